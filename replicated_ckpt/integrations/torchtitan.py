"""torchtitan: a checkpoint manager for `Trainer.Config.checkpoint`. Its checkpoints survive the loss of a node."""

import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicated_ckpt.integrations import check_versions

check_versions("torchtitan")  # before the import, which may fail with an older version

from torchtitan.components.checkpointer import MODEL, OPTIMIZER, TRAIN_STATE, CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools.logging import logger

from replicated_ckpt.config import Ack, Retention
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.dcp.planning.matched_state import drop_unsaved_state
from replicated_ckpt.dcp.rank_state.rank_state import (
    RankStatePlanner,
    capture_random,
    entries_of,
    restore_random,
    values_in,
    wanted_entries,
)
from replicated_ckpt.dcp.steps import NEWEST_STEP, step_of
from replicated_ckpt.errors import CheckpointNotFound

_RANDOM = "replicated_ckpt.random"


class _Planner(RankStatePlanner):
    """Does not ask for optimizer state that the checkpoint lacks: torchtitan's container accepts missing names."""

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        if metadata is not None and OPTIMIZER in state_dict:
            drop_unsaved_state(state_dict[OPTIMIZER], OPTIMIZER, metadata.state_dict_metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)


class ReplicatedCheckpointManager(CheckpointManager):
    """torchtitan's manager, with a store on each node. torchtitan decides what it saves, when, and for how long.

    Each rank saves to `root` on its own node's disk, under `step-<step>`, and to other nodes. All ranks load the same
    checkpoint, whatever lies on their nodes: the newest complete one, or `load_step`. With `keep_latest_k`, agents
    remove checkpoints on all nodes. Each rank's random generators are saved, too, and restored if as many ranks load as
    saved. torchtitan itself reads and writes an `initial_load_path`, and checkpoints in Hugging Face's format. Both
    asynchronous modes do the same: they copy the state once, at the start of the save.

    Written against torchtitan 0.3.0 (torchtitan/components/checkpointer/dcp.py), and commit b5bcd76c66 of 2026-08-21.
    """

    async_mode: AsyncMode
    _has_none = False  # True during torchtitan's own search, after no rank found a checkpoint

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The settings of torchtitan's manager, and of the replicated store."""

        root: str = ""
        """This node's store, a directory on its own disk; "": torchtitan's checkpoint folder."""

        copies: int = 2
        """Copies of every shard, the local one counted."""

        ack: Ack = "peer"
        """The state of the copies at the end of a save, as of ReplicatedWriter."""

        object_store: str | None = None
        """A bucket that gets the checkpoints, too: "s3://bucket/prefix"."""

        object_every: int = 1
        """Only every n-th checkpoint goes to the bucket."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)

    def __init__(self, config: Config, **parts: Any) -> None:
        """`parts`: as of torchtitan's manager."""
        super().__init__(config, **parts)
        if not self.enable:
            return
        if self.async_mode != AsyncMode.DISABLED:
            self.async_mode = (
                AsyncMode.ASYNC
            )  # otherwise torchtitan's stager of async_with_pinned_mem would copy the state, too
        retention = Retention(keep_last=config.keep_latest_k) if config.keep_latest_k > 0 else None
        self._root = Path(config.root or self.folder)
        options: dict[str, Any] = {"copies": config.copies, "ack": config.ack, "retention": retention}
        if config.object_store is not None:
            options |= {"object_store": config.object_store, "object_every": config.object_every}
        self._checkpoints = NamedCheckpoints(self._root, options, newest=NEWEST_STEP)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Saves as torchtitan's. An asynchronous save copies the state once, into memory that later saves reuse.

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedWriter.
        """
        if to_hf:
            theirs: Future[Any] | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return theirs
        name = self._name(checkpoint_id)
        if TRAIN_STATE in state_dict:  # the last save has the model only
            state_dict = {**state_dict, _RANDOM: entries_of(capture_random())}
        if async_mode != AsyncMode.DISABLED:
            return self._checkpoints.save_later(name, state_dict)
        self._checkpoints.save(name, state_dict)
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads a checkpoint of this run. torchtitan itself loads others (`initial_load_path`, Hugging Face's format).

        Raises:
            CheckpointException, ReplicatedCkptError: as of ReplicatedReader.
        """
        if from_hf or not Path(checkpoint_id).is_relative_to(self.folder):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        has_random = TRAIN_STATE in state_dict
        wanted = {**state_dict, _RANDOM: wanted_entries()} if has_random else state_dict
        self._checkpoints.load(self._name(checkpoint_id), wanted, _Planner())
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(wanted)
        own = values_in(wanted[_RANDOM], trust_pickles=False)[0] if has_random else None
        if own is not None:
            restore_random(own)
        elif has_random:
            logger.info("Another number of ranks saved this checkpoint: random generators stay as they are.")

    def _load(self, step: int = -1) -> bool:
        """Restores `step`, or the newest step. Without a checkpoint, torchtitan loads its own starting point.

        Raises:
            CheckpointNotFound: there is no such step.
        """
        found = self._find_load_step() if step == -1 else step
        if found == -1:
            self._has_none = True  # torchtitan searches again, but only on nodes that have its folder
            try:
                return bool(super()._load(-1))
            finally:
                self._has_none = False
        checkpoint_id = self._create_checkpoint_id(found)
        # A missing step must raise on all ranks. torchtitan would look into its own folder, which differs by node.
        if self._checkpoints.find(self._name(checkpoint_id)) is None:
            raise CheckpointNotFound(
                f"There is no checkpoint of step {found} in {self._root}.",
                "--checkpoint.load_step=-1 loads the newest one.",
            )
        self.dcp_load(self._states_to_load(model_only=found == 0), checkpoint_id, from_hf=False, from_quantized=False)
        return True

    def _find_load_step(self, folder: str = "") -> int:
        """The step of this run's newest complete checkpoint, the same on all ranks; -1: there is none."""
        if folder and folder != self.folder:
            return int(super()._find_load_step(folder))
        if self._has_none:
            return -1
        newest = self._checkpoints.find(NEWEST_STEP)
        return -1 if newest is None else step_of(newest)

    def _purge_stale_checkpoints(self) -> None:
        """Does nothing: agents remove checkpoints beyond `keep_latest_k`, on every node."""

    def _close(self) -> None:
        super()._close()
        checkpoints = getattr(self, "_checkpoints", None)  # __del__ calls this even after a failed __init__
        if checkpoints is not None:
            checkpoints.close()

    def _name(self, checkpoint_id: str) -> str:
        return os.path.relpath(checkpoint_id, self.folder)
