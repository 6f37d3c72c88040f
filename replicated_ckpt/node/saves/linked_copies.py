"""Copies of a shard whose bytes the nodes have already, as a shard of a committed save: each node links its own file."""

import logging
import time
from functools import partial

from replicated_ckpt.errors import ReplicatedCkptError, SaveAborted
from replicated_ckpt.node.saves.shard_copies import WantedCopies, WrittenCopies
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.linked import CommittedShard
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.fan_out import FanOut

log = logging.getLogger(__name__)


def link_copies(store: LocalStore, wanted: WantedCopies, source: CommittedShard) -> WrittenCopies | None:
    """Links a committed shard as the wanted one, in the node's own store and at all its buddies.

    None: one of them cannot link it. Then the shard is to be written with the same bytes, everywhere: a link that was
    made is as good as a written file, or is replaced by one.

    Raises:
        SaveAborted: the save was aborted elsewhere.
    """
    began = time.perf_counter()
    try:
        is_bad = DamageBook(store).has_file
        store.link_staged(wanted.save_id, wanted.name, source, is_bad, durable=True)
        FanOut.run(wanted.buddies, partial(_link_at, wanted=wanted, source=source)).raise_first()
    except SaveAborted:
        raise
    except ReplicatedCkptError as exc:
        log.info("%s is written anew, as it cannot be linked everywhere: %s", wanted.name, exc)
        return None
    phases = {"write": time.perf_counter() - began}
    holders = (wanted.own, *(buddy.node_id for buddy in wanted.buddies))
    return WrittenCopies(wanted.name, source.size_bytes, source.crc32c, holders, phases=phases)


def _link_at(buddy: AgentAddress, *, wanted: WantedCopies, source: CommittedShard) -> None:
    with AgentClient(buddy) as client:
        body = {"source": source.to_json(), "durable": wanted.durable}
        client.call("POST", f"/v1/saves/{wanted.save_id}/{wanted.name}/link", body)
