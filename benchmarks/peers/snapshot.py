"""torchsnapshot: a snapshot in a directory that all ranks share."""

import shutil

import torch.distributed as dist
from torchsnapshot import Snapshot, StateDict

from benchmarks.rank.state import State
from benchmarks.rank.ways import cool_files, shared_directory
from tests.steps.context import Context


class Torchsnapshot:
    def __init__(self, context: Context) -> None:
        self._base = shared_directory(context)

    def save(self, state: State, name: str) -> None:
        Snapshot.take(path=str(self._base / name), app_state={"state": StateDict(**state.local_tensors())})

    def settle(self, name: str) -> None:
        """Nothing to wait for: torchsnapshot does not fsync."""

    def load(self, state: State, name: str) -> None:
        """Loads into the existing tensors."""
        Snapshot(path=str(self._base / name)).restore({"state": StateDict(**state.local_tensors())})

    def cool(self, name: str) -> None:
        cool_files(self._base / name)

    def remove(self, name: str) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._base / name)
