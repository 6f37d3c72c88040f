"""`python -m replicated_ckpt.agent`: the agent as a process of its own. Ranks start it through `isolated.py`."""

import argparse
import sys

from replicated_ckpt.agent.command import HELP, add_arguments, run
from replicated_ckpt.agent.state.endpoint import ALREADY_SERVED, AlreadyServed
from replicated_ckpt.errors import ReplicatedCkptError

UNAVAILABLE = 5
"""Exit code, the same as that of `replicated-ckpt agent`."""


def main() -> int:
    parser = argparse.ArgumentParser("python -m replicated_ckpt.agent", "%(prog)s --root ROOT ...", HELP)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except ReplicatedCkptError as exc:
        sys.stderr.write(f"agent: {exc}\n")
        # Ranks that race to start an agent must see that another one won, which is not a failure.
        return ALREADY_SERVED if isinstance(exc, AlreadyServed) else UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
