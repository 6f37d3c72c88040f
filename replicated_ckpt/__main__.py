"""`python -m replicated_ckpt`: the command `replicated-ckpt`, where its folder is not on the PATH."""

import sys

from replicated_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
