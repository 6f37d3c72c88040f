"""Ray Train: a CheckpointManager that reports each checkpoint to Ray, and saves before a node is taken away."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from replicated_ckpt.integrations import check_versions

check_versions("ray")  # an older one may lack what is imported from it

import ray.train

from replicated_ckpt.dcp.manager import CheckpointManager
from replicated_ckpt.dcp.steps import check_step
from replicated_ckpt.errors import ConfigInvalid

_REFERENCE = "replicated_ckpt.json"


class RayCheckpointManager(CheckpointManager):
    """For the loop of a Ray Train worker, called by all workers. Checkpoints lie on their nodes, Ray gets references.

    `save` reports the checkpoint to Ray with its `metrics` before it returns. An asynchronous save is reported by the next
    call that waits for it, as `save` and `restore` do, else by `close`. `close` reports nothing while an exception is under
    way. The checkpoint that Ray keeps for it is a small file with the step, in its storage. So `Result.checkpoint`,
    `Result.metrics` and `ray.train.get_checkpoint` work, and the function `reported_step` returns the step of such a
    checkpoint. `CheckpointConfig` removes only the reference there: `retention` decides which checkpoints the nodes keep.

    `should_save` is true once more when Ray announces that a node is taken away (ray.train.get_preemption_info, Ray 2.60
    on), and for each further node. Training continues then, as Ray advises: Ray restarts the group when the node is gone.

    Arguments as of CheckpointManager, except `preempt_on`: signals cannot be caught in Ray's threads.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        if options.get("preempt_on"):
            raise ConfigInvalid(
                "preempt_on is set, but Ray calls the loop in a thread, where no signal can be caught.",
                "Leave it out: should_save asks Ray whether a node will be removed.",
            )
        super().__init__(root, **{**options, "preempt_on": ()})
        self._leaving: set[str] = set()
        self._unreported: tuple[int, Mapping[str, Any] | None] | None = None

    def should_save(self, step: SupportsIndex) -> bool:
        """As CheckpointManager's, and true once when Ray announces that a node is taken away."""
        is_due = super().should_save(step)
        info = ray.train.get_preemption_info()
        leaving = set() if info is None else set(info.preempted_node_ids)
        # Once per node: Ray repeats the notice until the node is gone.
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
        """As CheckpointManager's; it is reported to Ray when this returns."""
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
        """As CheckpointManager's; it is reported to Ray when the next call has waited for it."""
        super().async_save(step, state, metrics=metrics, metadata=metadata)
        self._unreported = check_step(step), metrics

    def close(self) -> None:
        """As CheckpointManager's. While an exception is under way nothing is reported: that waits for other workers."""
        if sys.exc_info()[1] is not None:
            self._unreported = None
        super().close()

    def _settle(self) -> None:
        # Taken first: a save that failed must not be reported by a later call.
        unreported, self._unreported = self._unreported, None
        super()._settle()
        if unreported is not None:
            _report(*unreported)


def reported_step(checkpoint: ray.train.Checkpoint) -> int:
    """The step of one of Ray's checkpoints: `manager.restore(state, reported_step(ray.train.get_checkpoint()))`.

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
            f"No RayCheckpointManager reported {checkpoint}.", "Load it as the program that reported it does."
        )
    return step


def _report(step: int, metrics: Mapping[str, Any] | None) -> None:
    """All workers report, as Ray demands; rank 0 adds the reference."""
    told = {"step": step, **(metrics or {})}
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(told)
        return
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / _REFERENCE).write_text(json.dumps({"step": step}), encoding="utf-8")
        ray.train.report(told, checkpoint=ray.train.Checkpoint.from_directory(directory))
