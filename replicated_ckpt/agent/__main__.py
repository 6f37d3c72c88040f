"""`python -m replicated_ckpt.agent`: the agent as a process."""

import sys

from replicated_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["agent", *sys.argv[1:]]))
