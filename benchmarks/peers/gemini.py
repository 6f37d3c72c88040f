"""lm-resiliency (GEMINI): a copy in the partner's memory, and the rank's own copy with a checksum on the node's disk."""

import logging
import os
from typing import Any

from lm_resiliency import InMemoryCkptConfig
from lm_resiliency.experimental import InMemoryCheckpointManager

from benchmarks.rank.state import State
from benchmarks.rank.ways import shared_directory
from tests.steps.context import Context

_NEVER_BY_ITSELF = 1 << 30


class LmResiliency:
    """Each load uses a new manager, as after a restart, which reads the node's own disk."""

    def __init__(self, context: Context) -> None:
        logging.getLogger("lm_resiliency").setLevel(logging.ERROR)
        self._folder = shared_directory(context) / f"lm-resiliency-{context.node}"
        self._saver: Any = None
        self._step = 0

    def _manager(self) -> Any:
        return InMemoryCheckpointManager(
            InMemoryCkptConfig(
                interval=1,
                replication_jump=int(os.environ["LOCAL_WORLD_SIZE"]),
                disk_flush_interval=_NEVER_BY_ITSELF,
                disk_folder=str(self._folder),
                run_id="benchmark",
                verify_integrity=True,
                pin_memory=False,
            )
        )

    def save(self, state: State, name: str) -> None:
        if self._saver is None:
            self._saver = self._manager()
        self._step += 1
        self._saver.save(state.local_tensors(), self._step)
        self._saver.maybe_wait()
        self._saver.finalize_replication()
        self._saver.flush_to_disk(self._step)  # the manager itself flushes only the previous step
        self._saver._disk.wait()  # noqa: SLF001 - it has no public call that waits for the disk

    def settle(self, name: str) -> None:
        """Nothing is left to do: `save` waits for both copies."""

    def load(self, state: State, name: str) -> None:
        manager = self._manager()
        loaded = manager.load()
        assert loaded is not None, "it finds nothing"
        assert loaded[1] == self._step, f"it finds step {loaded[1]}, not {self._step}"
        for part_name, tensor in state.local_tensors().items():
            tensor.copy_(loaded[0][part_name])

    def cool(self, name: str) -> None:
        """Not needed: this tool is compared in memory only."""

    def remove(self, name: str) -> None:
        """Not needed: the tool keeps two checkpoints and removes older ones by itself."""
