"""An agent that says it is of another release: `python -m tests.agent.pretending PROTOCOL VERSION ARGUMENTS...`."""

import sys

from replicated_ckpt import version


def pretend(protocol: int, release: str) -> None:
    """This process is of another release. What reads that is imported afterwards."""
    version.PROTOCOL, version.__version__ = protocol, release
    version.RELEASE = f"{protocol} {release}"


if __name__ == "__main__":
    pretend(int(sys.argv.pop(1)), sys.argv.pop(1))
    from replicated_ckpt.agent.__main__ import main

    sys.exit(main())
