"""NVIDIA's resiliency extension: local checkpoints of each rank, alone or in cliques of two nodes.

Its state dict needs CUDA tensors, and its transfer after a loss calls `.cuda()`. A user without a GPU must replace the
state dict, which is an extension point, and two methods of its group. This module does so.
"""

import logging
import os
import shutil
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

from benchmarks.rank.losing import is_of_last_node
from benchmarks.rank.state import State
from benchmarks.rank.ways import is_first_of_node, shared_directory
from tests.steps.context import Context


class CpuStateDict(BasicTensorAwareStateDict):  # type: ignore[misc]  # the package has no types
    """Keeps tensors on the CPU."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.state_dict = tensors
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Nothing to do: the tensors are on the right device."""


def _send(group: Any, state: Any, target: int) -> dict[str, int]:
    tensors = state.pop_tensors()
    group.send_object(state, target)
    for tensor in tensors:
        dist.send(tensor, target, group=group.group)
    state.insert_tensors(tensors)
    return {"data_sent": sum(tensor.nbytes for tensor in tensors)}


def _receive(group: Any, source: int) -> tuple[Any, dict[str, int]]:
    state = group.recv_object(source)
    state.init_tensors()
    received = list(state.tensors)
    for tensor in received:
        dist.recv(tensor, source, group=group.group)
    return state, {"data_recv": sum(tensor.nbytes for tensor in received)}


class Nvrx:
    """One manager for saves, and a new one for each load, as after a restart. Keeps only the newest checkpoint."""

    def __init__(self, context: Context, copies: int) -> None:
        logging.getLogger("nvidia_resiliency_ext").setLevel(logging.ERROR)
        GroupWrapper.isend_state_dict, GroupWrapper.irecv_state_dict = _send, _receive
        self._context = context
        self._folder = shared_directory(context) / f"nvrx{copies}-{context.node}"
        jump = int(os.environ["LOCAL_WORLD_SIZE"])
        self._strategy = CliqueReplicationStrategy.from_replication_params(jump, copies) if copies > 1 else None
        self._saver = self._manager()
        self._step = 0

    def _manager(self) -> Any:
        return LocalCheckpointManager(self._folder, repl_strategy=self._strategy)

    def save(self, state: State, name: str) -> None:
        self._step += 1
        self._saver.save(CpuStateDict(state.local_tensors()), self._step, is_async=False)

    def settle(self, name: str) -> None:
        """Nothing is left to do: `save` waits for all copies. After a loss nvrx restores no copies."""

    def load(self, state: State, name: str) -> None:
        """nvrx returns new tensors, which are copied into the model's."""
        manager = self._manager()
        found = manager.find_latest()
        assert found == self._step, f"its newest is {found}, not {self._step}"
        loaded, _ = manager.load()
        for part_name, tensor in state.local_tensors().items():
            tensor.copy_(loaded.state_dict[part_name])

    def lose(self) -> None:
        if is_of_last_node(self._context) and is_first_of_node():
            shutil.rmtree(self._folder)

    def cool(self, name: str) -> None:
        """Not needed: this tool is compared in memory only."""

    def remove(self, name: str) -> None:
        """Not needed: the next save removes the checkpoint."""
