"""The marks on checkpoints that this node keeps: restores since the last save, and rejections."""

import logging
import threading
from collections.abc import Collection, Iterable
from pathlib import Path

from replicated_ckpt.core.upkeep.marks import (
    LEARNED_MAX,
    NO_MARKS,
    REJECTIONS_MAX,
    RESTORES_MAX,
    RUNS_MAX,
    Marks,
    Restores,
    merge_marks,
    merge_restores,
    next_revision,
)
from replicated_ckpt.errors import ConfigInvalid, StoreError
from replicated_ckpt.node.state.state_file import StateFile

log = logging.getLogger(__name__)

NAME = "marks.json"


class MarkBook:
    """The marks of one node. Safe for concurrent use by threads.

    A damaged file counts as empty: other nodes have the same marks. The file has a checksum, as one flipped bit could
    reject a good checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._file = StateFile(directory / NAME)
        self._lock = threading.Lock()
        self._marks = self._file.read_checked("marks", Marks.from_json) or NO_MARKS

    def read(self) -> Marks:
        with self._lock:
            return self._marks

    def reject(self, save_ids: Iterable[str], told: Marks, *, is_rejected: bool) -> None:
        """Rejects saves on the command of this node's own user, or ends their rejection.

        `told`: the marks of the other nodes, which the new marks supersede.

        Raises:
            ConfigInvalid: a false mark of another node cannot be superseded. StoreError: the marks cannot be stored. In
                both cases nothing has changed.
        """
        with self._lock:
            known, rejections = merge_marks([self._marks, told]).rejections, dict(self._marks.rejections)
            for save_id in save_ids:
                rejections.pop(save_id, None)  # to the end, as the newest
                try:
                    revision = next_revision(known.get(save_id, 0), is_rejected=is_rejected)
                except ValueError as exc:
                    raise ConfigInvalid(
                        f"The mark of save {save_id} cannot change: the agent of another node sends a false one.",
                        "Run `replicated-ckpt forget NODE` for that node, and set the mark again.",
                    ) from exc
                if revision:  # 0: no node has ever rejected it; only the bucket may have a mark
                    rejections[save_id] = revision
            rejections = dict(list(rejections.items())[-REJECTIONS_MAX:])
            self._keep(Marks(rejections, self._marks.restores))

    def learn(self, told: Iterable[Marks], here: Collection[str]) -> None:
        """Takes over other nodes' rejections of the saves that lie `here`. If they cannot be stored, that is only logged.

        A full book takes no more: a lying peer could otherwise push out the marks of this node's own user.
        """
        received = {one: number for one, number in merge_marks(told).rejections.items() if number <= LEARNED_MAX}
        with self._lock:
            known = self._marks.rejections
            later = {save_id: received[save_id] for save_id in here if received.get(save_id, 0) > known.get(save_id, 0)}
            later = {one: found for one, found in later.items() if one in known or len(known) < REJECTIONS_MAX}
            if not later:
                return
            rejections = dict(list({**known, **later}.items())[:REJECTIONS_MAX])
            self._keep_or_log(Marks(rejections, self._marks.restores))
        for save_id, revision in later.items():
            log.info("save %s %s", save_id, "is rejected" if revision % 2 else "is no longer rejected")

    def note_restores(self, lineage: str, newest: int, save_id: str, count: int) -> None:
        """Records that a load has begun to restore a save, for the `count`-th time since the run's newest save.

        `newest`: the sequence of that newest save. If this cannot be stored, that is only logged: the load must go on.
        """
        with self._lock:
            restores = dict(self._marks.restores)
            received = Restores(newest, {save_id: min(count, RESTORES_MAX)})
            # To the end, as the newest: the run that was restored longest ago is forgotten.
            restores[lineage] = merge_restores(restores.pop(lineage, received), received)
            restores = dict(list(restores.items())[-RUNS_MAX:])
            self._keep_or_log(Marks(self._marks.rejections, restores))

    def _keep_or_log(self, marks: Marks) -> None:
        """With the lock held."""
        try:
            self._keep(marks)
        except StoreError as exc:
            self._marks = marks
            log.warning("marks on checkpoints are forgotten when this process ends: %s", exc)

    def _keep(self, marks: Marks) -> None:
        """With the lock held. Raises StoreError: nothing has changed."""
        self._file.write_checked("marks", marks.to_json())
        self._marks = marks
