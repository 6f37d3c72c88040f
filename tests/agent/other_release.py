"""An agent that reports another release: `python -m tests.agent.other_release PROTOCOL VERSION ARGUMENTS...`."""

import sys

from replicated_ckpt import version


def set_release(protocol: int, release: str) -> None:
    """Sets the release of this process. Call it before the modules that read the release are imported."""
    version.PROTOCOL, version.__version__ = protocol, release
    version.RELEASE = f"{protocol} {release}"


if __name__ == "__main__":
    set_release(int(sys.argv.pop(1)), sys.argv.pop(1))
    from replicated_ckpt.agent.__main__ import main

    sys.exit(main())
