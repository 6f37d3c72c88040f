"""The question before a load: is there a checkpoint? Every rank gets the same answer, or every rank the same error."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from replicated_ckpt.config import NEWEST_LINEAGE
from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.absence import THERE_ARE_OTHERS
from replicated_ckpt.dcp.find.rendezvous import AgreedError, meet
from replicated_ckpt.errors import CheckpointNotFound, StoreUnavailable
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)

_told: deque[str] = deque(maxlen=16)
"""What this process has logged last of checkpoints that are not loaded: not again, as one restore looks several times."""


def look_up(
    store: LocalStore,
    world: World,
    checkpoint_id: str,
    opened_bucket: Callable[[], Bucket | None],
    lineage: str = NEWEST_LINEAGE,
) -> SaveFound | None:
    """The committed checkpoint that a load of `checkpoint_id`, or "latest", would find now; None without one.

    One that is found and not whole counts as found: a job that began anew next to it would take a loss for a first start.

    Raises as ReplicatedReader.exists and latest; ConfigInvalid, CheckpointIdMismatch: the ranks ask wrongly.
    """
    try:
        look = replace(world, is_load=False)
        survey = meet(store, look, checkpoint_id, opened_bucket, lineage=lineage)
    except (AgreedError, CheckpointNotFound) as exc:
        error = exc.error if isinstance(exc, AgreedError) else exc
    else:
        _tell_once(world, survey.passed_over)
        return survey.found
    if not isinstance(error, CheckpointNotFound):
        raise error
    newest = Newest.parse(checkpoint_id)
    if error.unreached:
        key = checkpoint_id if newest is None else "the newest checkpoint"
        hint = (
            "It may hold the checkpoint: bring it back, or, if it is a bucket, see whether its name and the credentials "
            "are right."
        )
        raise StoreUnavailable("; ".join(error.unreached), "look for", key, "no other store has it", hint)
    if newest is not None and newest.form and THERE_ARE_OTHERS in error.message:
        _tell_once(world, f"{error.message} A job that restores here begins anew.")
    return None


def _tell_once(world: World, told: str) -> None:
    if told and told not in _told and world.is_coordinator:
        log.warning("%s", told)
        _told.append(told)
