"""torchrun that imports the ranks' modules once per node: `python -m replicated_ckpt.drill.job.launcher TORCHRUN_ARGS`.

With `--start-method fork --run-path` the ranks then start in milliseconds. Otherwise each rank imports torch itself, which
takes some four CPU seconds. Nothing here starts a thread or touches a GPU before the fork.
"""

import faulthandler
import importlib
import signal
import sys

IMPORTED_ONCE = (
    "torch._dynamo",  # fully_shard and the optimizers import it on first use
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "replicated_ckpt.dcp.load.reader",
    "replicated_ckpt.dcp.save.writer",
)


def main() -> None:
    """Runs one node's torchrun to its end."""
    # The drill sends SIGUSR1 for stacks. By default that signal ends a process.
    faulthandler.register(signal.SIGUSR1)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
