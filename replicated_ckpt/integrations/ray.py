"""Ray Train: a CheckpointManager that reports each checkpoint to Ray, and saves before Ray removes a node."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from replicated_ckpt.integrations import check_versions

check_versions("ray")  # before the import, which may fail with an older version

import ray.train

from replicated_ckpt.dcp.manager import CheckpointManager
from replicated_ckpt.dcp.steps import check_step
from replicated_ckpt.errors import ConfigInvalid

_REFERENCE = "replicated_ckpt.json"


class RayCheckpointManager(CheckpointManager):
    """For the loop of a Ray Train worker; all workers make each call. Checkpoints lie on their nodes, Ray gets references.

    `save` reports the checkpoint to Ray with its `metrics` before it returns. The next call that waits for an
    asynchronous save, such as `save`, `restore` or `close`, reports it. `close` reports nothing during an exception. Ray's
    storage gets a small file with the step, so `Result.checkpoint`, `Result.metrics` and `ray.train.get_checkpoint` work.
    The function `reported_step` returns the step of such a checkpoint. `CheckpointConfig` removes only this small file:
    `retention` decides which checkpoints the nodes keep.

    `should_save` is true once more when Ray announces the removal of a node (ray.train.get_preemption_info, from Ray 2.60
    on), and for each further node. Training continues then, as Ray advises: Ray restarts the workers after the removal.

    Arguments as of CheckpointManager, except `preempt_on`: signals cannot be caught in Ray's threads.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        if options.get("preempt_on"):
            raise ConfigInvalid(
                "preempt_on is set, but Ray calls the loop in a thread, where no signal can be caught.",
                "Omit it: should_save asks Ray whether a node will be removed.",
            )
        super().__init__(root, **{**options, "preempt_on": ()})
        self._leaving: set[str] = set()
        self._unreported: tuple[int, Mapping[str, Any] | None] | None = None

    def should_save(self, step: SupportsIndex) -> bool:
        """As CheckpointManager's, and true once for each node whose removal Ray announces."""
        is_due = super().should_save(step)
        info = ray.train.get_preemption_info()
        leaving = set() if info is None else set(info.preempted_node_ids)
        # Once per node: Ray repeats the notice until the node is removed.
        is_news = not leaving <= self._leaving
        self._leaving |= leaving
        return is_due or is_news

    def save(
        self,
        step: SupportsIndex,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """As CheckpointManager's. Reports the checkpoint to Ray before it returns."""
        super().save(step, state, metrics=metrics, metadata=metadata)
        _report(check_step(step), metrics)

    def async_save(
        self,
        step: SupportsIndex,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """As CheckpointManager's. The next call that waits for the save reports it to Ray."""
        super().async_save(step, state, metrics=metrics, metadata=metadata)
        self._unreported = check_step(step), metrics

    def close(self) -> None:
        """As CheckpointManager's. Reports nothing during an exception, because a report waits for the other workers."""
        if sys.exc_info()[1] is not None:
            self._unreported = None
        super().close()

    def _settle(self) -> None:
        # First: a later call must not report a save that failed.
        unreported, self._unreported = self._unreported, None
        super()._settle()
        if unreported is not None:
            _report(*unreported)


def reported_step(checkpoint: ray.train.Checkpoint) -> int:
    """The step of a checkpoint in Ray's storage: `manager.restore(state, reported_step(ray.train.get_checkpoint()))`.

    Raises:
        ConfigInvalid: no RayCheckpointManager reported this checkpoint.
    """
    with checkpoint.as_directory() as directory:
        try:
            step = json.loads((Path(directory) / _REFERENCE).read_bytes())["step"]
        except (OSError, ValueError, KeyError, TypeError):
            step = None
    if not isinstance(step, int):
        raise ConfigInvalid(
            f"No RayCheckpointManager reported {checkpoint}.", "Load it with the class that reported it."
        )
    return step


def _report(step: int, metrics: Mapping[str, Any] | None) -> None:
    """Reports a step on all workers, as Ray requires. Rank 0 adds the file with the step."""
    values = {"step": step, **(metrics or {})}
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(values)
        return
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / _REFERENCE).write_text(json.dumps({"step": step}), encoding="utf-8")
        ray.train.report(values, checkpoint=ray.train.Checkpoint.from_directory(directory))
