"""Gloo process groups in the test process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

# A gloo thread that drops the last reference to a tensor while the interpreter ends aborts the process (seen on torch
# 2.13: ~AsyncAllgatherCoalescedWork in ProcessGroupGloo::runLoop waits for the GIL of a finalizing interpreter).
GLOO_SETTLE_S = 0.2


def end_group() -> None:
    """Destroys the groups. Torch 2.7 joins their threads while it holds the GIL, for which a thread that drops a tensor
    may wait.
    """
    if torch.__version__ < TorchVersion("2.8"):
        time.sleep(GLOO_SETTLE_S)
    dist.destroy_process_group()


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, which DTensor and collectives need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        end_group()
