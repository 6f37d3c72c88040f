"""ml-flashpoint: a copy in the memory of the rank's node, sent to the partner's node after the save has returned.

ml-flashpoint identifies an object by its absolute path, which must be the same on all nodes. Each rank therefore mounts
its node's folder there, which needs root. Its loads need two files on every node. Its saves for Megatron write them,
its DCP writer does not.
"""

import concurrent.futures
import logging
import multiprocessing.dummy
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.replication.replication_manager import PairwiseReplicationStrategy, ReplicationManager
from ml_flashpoint.replication.transfer_service import transfer_service_ext

from benchmarks.rank.losing import is_of_last_node
from benchmarks.rank.state import State
from benchmarks.rank.ways import context_nodes, is_first_of_node, shared_directory
from tests.harness.namespaces import mount_privately
from tests.steps.context import Context

_BUFFER_BYTES = 128 << 20  # for one rank; the unused rest is cut off
_REPLICATED_WITHIN_S = 90.0
_METADATA, _COMMON = ".metadata", "common.pt"


class _Replication(ReplicationManager):  # type: ignore[misc]  # the package has no types
    """Keeps the futures of copies that are being sent, which the saver drops."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Any] = []

    def async_replicate(self, buffer_io: Any) -> Any:
        futures = super().async_replicate(buffer_io)
        self.under_way += futures
        return futures

    def wait(self) -> None:
        futures, self.under_way = self.under_way, []
        for future in concurrent.futures.wait(futures, _REPLICATED_WITHIN_S).done:
            assert future.result().success, future.result().error_message
        assert all(future.done() for future in futures), f"no copies after {_REPLICATED_WITHIN_S:.0f} s"


class Flashpoint:
    """One writer for all saves, and a new loader for each load, as after a restart."""

    def __init__(self, context: Context) -> None:
        logging.getLogger("ml_flashpoint").setLevel(logging.ERROR)
        os.environ["NNODES"] = str(context_nodes(context))
        self._context = context
        self._home = shared_directory(context) / "flashpoint"  # this node's folder, after the mount
        disk = shared_directory(context) / f"flashpoint-{context.node}"
        for folder in (self._home, disk):
            folder.mkdir(exist_ok=True)
        mount_privately([(str(disk), str(self._home))])
        self._objects = CheckpointObjectManager()
        self._replication = _replication(self._objects)
        self._saver = DefaultMLFlashpointCheckpointSaver(
            dist.get_rank,
            dist.get_node_local_rank,
            dist.barrier,
            self._objects,
            self._replication,
            initial_buffer_size_bytes=_BUFFER_BYTES,
        )
        shared: concurrent.futures.Future[Any] = concurrent.futures.Future()
        shared.set_result(multiprocessing.dummy.Manager())  # no other process writes here
        self._writer = MemoryStorageWriter(self._saver, shared)
        self._step = 0

    @property
    def _container(self) -> Any:
        name = CheckpointContainerId.format_version_container(self._step)
        return CheckpointContainerId.create_child(CheckpointContainerId(str(self._home)), name)

    def save(self, state: State, name: str) -> None:
        self._step += 1
        dcp.save(state.values, checkpoint_id=str(self._container), storage_writer=self._writer)
        self._complete(Path(str(self._container)))
        self._saver.finalize_checkpoint(self._container)

    def _complete(self, folder: Path) -> None:
        """Gives every node the metadata, without which nothing is found after the first node is lost, and an empty
        common part.
        """
        metadata = [(folder / _METADATA).read_bytes() if self._context.rank == 0 else None]
        dist.broadcast_object_list(metadata)
        if is_first_of_node():
            (folder / _COMMON).write_bytes(bytes(1))
            if self._context.rank != 0:
                (folder / _METADATA).write_bytes(metadata[0] or b"")

    def settle(self, name: str) -> None:
        """Waits until the partner's node has its copies. After a loss ml-flashpoint restores no copies."""
        self._replication.wait()

    def load(self, state: State, name: str) -> None:
        loader = DefaultMLFlashpointCheckpointLoader(
            self._objects,
            self._replication,
            global_rank_getter=dist.get_rank,
            local_rank_getter=dist.get_node_local_rank,
            broadcast_object_list_func=dist.broadcast_object_list,
            all_gather_object_func=dist.all_gather_object,
            world_size_getter=dist.get_world_size,
        )
        found = loader.get_latest_complete_checkpoint(CheckpointContainerId(str(self._home)))
        assert found == self._container, f"its newest is {found}, not {self._container}"
        dcp.load(state.values, checkpoint_id=str(found), storage_reader=MemoryStorageReader(str(found), loader))

    def lose(self) -> None:
        if is_of_last_node(self._context) and is_first_of_node():
            shutil.rmtree(str(self._container))

    def cool(self, name: str) -> None:
        """Not needed: this tool is compared in memory only."""

    def remove(self, name: str) -> None:
        if is_first_of_node():
            shutil.rmtree(str(self._container))


def _replication(objects: Any) -> _Replication:
    """The partner of a rank is the rank with the same local rank on the next node."""
    service = transfer_service_ext.TransferService()
    port = service.initialize(0, global_rank=dist.get_rank())
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, f"127.0.0.1:{port}")
    replication = _Replication()
    strategy = PairwiseReplicationStrategy(addresses, int(os.environ["LOCAL_WORLD_SIZE"]))
    replication.initialize(objects, replication_transfer_service=service, repl_strategy=strategy)
    return replication
