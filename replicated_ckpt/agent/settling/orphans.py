"""Orphans: saves whose ranks on this node are gone after they handed their shards over; they are settled at once."""

import logging
import time

from replicated_ckpt.agent.saves.doubts import Leftover
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.agent.settling.settle import settle
from replicated_ckpt.errors import ReplicatedCkptError

log = logging.getLogger(__name__)

_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.3, 3.0
"""Each look asks all nodes of the save, one look for each shard that a rank had handed over."""
FOLLOW_S = 60.0
"""So long after the last word of the coordinator's node. From then on re-protection settles it, as any save left behind."""
STAY_S = 90.0
"""An agent that ranks started does not leave a save that was opened here so short ago: re-protection settles it by then."""


def awaits_settling(service: NodeService) -> bool:
    """Whether something is staged here that re-protection has not looked at yet, as its ranks may have come.

    Raises:
        StoreError: it cannot be seen.
    """
    staged = service.store.list_staged()
    return any(service.was_opened_within(STAY_S, each) and not service.doubts.has(each.save_id) for each in staged)


def follow_orphan(service: NodeService, save_id: str) -> None:
    """Returns once nothing of the save is staged here: it was published, or given up. Or after a while in doubt.

    While a rank, or the agent that finishes the save, holds it, nothing is asked. While the coordinator's node says that it
    works on the save it is asked on, however long other nodes write. An agent that ranks started does not leave meanwhile.
    """
    with service.hand_overs.following():
        until, pause_s = time.monotonic() + FOLLOW_S, _PAUSE_FIRST_S
        while time.monotonic() < until:
            try:
                if not service.store.is_staged(save_id):
                    return
                if service.is_held(save_id) or not _is_in_doubt(service, save_id):
                    until = time.monotonic() + FOLLOW_S
            except (ReplicatedCkptError, OSError) as exc:  # it was published or given up, or the disk refuses
                log.info("what becomes of save %s is looked at again soon: %s", save_id, exc)
            time.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, 1.3 * pause_s)


def _is_in_doubt(service: NodeService, save_id: str) -> bool:
    """Settles the save, as far as that can be done now; whether it is in doubt then."""
    intent = service.store.intent_of(save_id)
    settle(service, [Leftover(intent, "its ranks are gone")], service.peers.read_all())
    return service.doubts.has(save_id)
