"""The coordinator's last steps of a save: check that every shard is written, decide durably, have every node publish."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from replicated_ckpt import failpoints
from replicated_ckpt.config import WriterConfig
from replicated_ckpt.core.commit_mark import own_prefix
from replicated_ckpt.core.divergence import DIVERGENCES_MAX, Divergence
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import (
    Manifest,
    NodeEntry,
    RefusedNotes,
    ShardEntry,
    UploadEntry,
    WeightsEntry,
    decode_manifest,
)
from replicated_ckpt.core.protocol.placement import intended_holders
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision
from replicated_ckpt.dcp.agreement.nodes import Cluster, Committed
from replicated_ckpt.dcp.metadata.metadata import encode_metadata, share_parts
from replicated_ckpt.dcp.metadata.saved_metadata import encode_metadata_file
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayout, CachedLayouts
from replicated_ckpt.dcp.runtime.gc_pause import pause_collections
from replicated_ckpt.dcp.runtime.torch_private import metadata_version
from replicated_ckpt.dcp.save.save_report import add_phases
from replicated_ckpt.dcp.save.shard_files import Parts, without_optimizer
from replicated_ckpt.dcp.save.submission import AgentSilent, finish_by_agent
from replicated_ckpt.errors import AckNotReached, SaveAborted, StoreError
from replicated_ckpt.node.saves.finish import Finished, HelperCopy, Outline
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.publish import check_decidable


def commit_save(
    store: LocalStore,
    cluster: Cluster,
    decision: SaveDecision,
    config: WriterConfig,
    receipts: Sequence[Receipt],
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    *,
    notes: Mapping[str, Any] | None = None,
    start_agent: Callable[[], object] = lambda: None,
    layouts: CachedLayouts | None = None,
    parts: Parts | None = None,
    find_divergences: Callable[[Metadata], Sequence[Divergence]] = lambda _: (),
    helpers_by_shard: Mapping[str, Sequence[HelperCopy]] | None = None,
    exclude: Callable[[Sequence[tuple[str, str]]], object] = lambda _: None,
) -> tuple[list[str], Sequence[Receipt]]:
    """Commits a save whose shards are all written, or submitted to agents. This node's agent waits for submitted ones.

    Returns descriptions of what is weaker than wanted, and the receipts, completed by the agents' results. `notes` are
    stored in the manifest. `exclude` is called with the copies of `helpers_by_shard` that do not count
    (`Finished.differing`), also if this raises. `layouts`: if the layout equals that of the previous save, `.metadata`
    is the same, and is neither made nor sent again. `start_agent` starts this node's agent again if it has died.
    `find_divergences` is called once all items have their places. It may raise; its result is stored in the manifest.

    Afterwards the save is committed on every node that the result does not name. If this raises before the decision,
    the save is aborted everywhere. Once the decision may be durable, the save is never aborted.

    Raises:
        SaveAborted: an item lies in a shard that no rank has written, or an agent could not write one.
        ReplicasDiverged: from `find_divergences`.
        ConfigInvalid: the notes cannot be stored.
        CheckpointExists: another save of this id was faster, and this one may not replace it.
        AckNotReached: the decision is durable here, but no holder of some shard has published it. Or, if `on_degraded`
            is "raise", fewer holders have published a shard than acknowledged it. The save will be completed all the
            same.
        StoreError: the decision could not be made durable. StoreUnavailable: it is unknown how far this node's agent
            got.
    """
    layouts, parts = layouts or CachedLayouts(), parts or Parts()
    with _abort_on_error(cluster, decision.save_id):
        # Raised only now: if one rank alone raised earlier, the other ranks would wait for it.
        if isinstance(notes, RefusedNotes):
            raise notes.error
        with pause_collections():
            shards = _make_shard_entries(decision, receipts)
            same, layout = lay_out(decision, shards, metadata, results, layouts, parts)
            raw_metadata, manifest = _make_manifest(
                decision, config.copies, shards, metadata, layout, notes or {}, parts
            )
            divergences = find_divergences(metadata)
            if divergences:
                manifest = replace(manifest, divergences=tuple(divergences[:DIVERGENCES_MAX]))
        failpoints.reach("coordinator.accounted")
        # Before the manifest: a node with a manifest counts as decided, and must have the metadata.
        store.put_small(decision.save_id, METADATA_NAME, raw_metadata)
        failpoints.reach("coordinator.metadata-staged")
    with _abort_on_error(cluster, decision.save_id, lambda: _may_be_decided(store, decision.save_id)):
        helpers = helpers_by_shard or {}
        manifest, receipts, missed = _decide(store, decision, config, manifest, receipts, start_agent, helpers, exclude)
    failpoints.reach("coordinator.decided")
    # Only once decided: later saves must not refer to the layout of an aborted save.
    layouts.keep(layout)
    is_as_before = raw_metadata == layout.raw  # otherwise it also has the paths of this save in the bucket
    committed = cluster.commit(decision.save_id, raw_metadata, manifest.encode(), same if is_as_before else None)
    failpoints.reach("coordinator.published")
    late = [*_list_late(committed, decision), *_list_dropped(committed, receipts)]
    _check_reached(manifest, committed, must_have_all=config.must_have_all_copies)
    return [*missed, *late], receipts


@contextmanager
def _abort_on_error(
    cluster: Cluster, save_id: str, may_be_decided: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """If the block raises, has every node abort the save, unless its decision may be durable: a decision is never taken
    back.
    """
    try:
        yield
    except AgentSilent:
        raise  # the agent may have decided: nothing may be aborted
    except BaseException as exc:
        if not may_be_decided():
            cluster.abort(save_id, f"the coordinator failed: {type(exc).__name__}: {exc}")
        raise


def _may_be_decided(store: LocalStore, save_id: str) -> bool:
    """Whether this node has the decision or the published version, or its disk cannot be read.

    An interrupt or a failed fsync may raise after the manifest got its name. From then on, each agent that asks about the
    save publishes it.
    """
    try:
        return store.is_decided(save_id) or store.catalog.checkpoint_of(save_id) is not None
    except StoreError:
        return True  # unreadable is not undecided: an abort would contradict a decision that survives


def _list_late(committed: Committed, decision: SaveDecision) -> list[str]:
    """The nodes that have not published the save. The reason is left out for nodes that were reported when it began."""
    return [
        f"node {node} has not published the checkpoint yet"
        + ("; it does so once it is reached" if node in decision.unreached else f": {error}")
        for node, error in committed.error_by_node.items()
    ]


def _list_dropped(committed: Committed, receipts: Sequence[Receipt]) -> list[str]:
    """The copies that a node had acknowledged, but did not publish with the save."""
    return [
        f"node {node} has moved its copy of {shard.name} aside: its bytes differ from the saved ones"
        for receipt in receipts
        for shard in receipt.shards
        for node in shard.holders
        if node in committed.held_by_node and node not in committed.holders_of(shard.name)
    ]


def _decide(
    store: LocalStore,
    decision: SaveDecision,
    config: WriterConfig,
    manifest: Manifest,
    receipts: Sequence[Receipt],
    start_agent: Callable[[], object],
    helpers_by_shard: Mapping[str, Sequence[HelperCopy]],
    exclude: Callable[[Sequence[tuple[str, str]]], object],
) -> tuple[Manifest, Sequence[Receipt], list[str]]:
    """Makes the decision durable, or has this node's agent do so once agents have written the shards.

    Returns the manifest, the receipts completed by the agents' results, and descriptions of missing copies.
    """
    if not helpers_by_shard and not any(receipt.is_submitted for receipt in receipts):
        # Once more, right before the decision: with overwrite=False another run may have taken the name meanwhile.
        check_decidable(store.root, store.intent_of(decision.save_id))
        store.put_small(decision.save_id, MANIFEST_NAME, manifest.encode())
        return manifest, receipts, []
    outline = _make_outline(decision, config, manifest, receipts, helpers_by_shard)
    finished = finish_by_agent(store, outline, start_agent)
    exclude(finished.differing)
    missed = [what for copies in finished.written for what in copies.missed]
    manifest = _read_decided(decision, finished, missed)
    return manifest, [_complete(receipt, manifest, finished) for receipt in receipts], missed


def _read_decided(decision: SaveDecision, finished: Finished, missed: Sequence[str]) -> Manifest:
    """The manifest that the agent has decided. Raises AckNotReached: copies are missing, and the save needs all of
    them.
    """
    if not finished.manifest:
        have = {copies.name: len(copies.holders) for copies in finished.written if copies.missed}
        raise AckNotReached(decision.placement.copies, have, "; ".join(missed))
    return decode_manifest(finished.manifest.encode(), "what this node's agent has decided")


def _complete(receipt: Receipt, manifest: Manifest, finished: Finished) -> Receipt:
    """The receipt of a rank whose shard an agent has written in the meantime."""
    names = {copies.name for copies in finished.written}
    if names.isdisjoint(shard.name for shard in receipt.shards) and not receipt.is_submitted:
        return receipt
    entries = {shard.name: manifest.shards[shard.name] for shard in receipt.shards}
    written = {copies.name: copies for copies in finished.written if copies.name in entries}
    shards = (
        # A restarted agent returns only the manifest of a published save, which names the intended holders.
        replace(
            shard,
            size_bytes=entries[shard.name].size_bytes,
            crc32c=entries[shard.name].crc32c,
            holders=(written.get(shard.name) or entries[shard.name]).holders,
        )
        for shard in receipt.shards
    )
    phases = add_phases(copies.phases for copies in written.values())
    return replace(receipt, shards=tuple(shards), phases={**receipt.phases, **phases})


def _make_outline(
    decision: SaveDecision,
    config: WriterConfig,
    manifest: Manifest,
    receipts: Sequence[Receipt],
    helpers_by_shard: Mapping[str, Sequence[HelperCopy]],
) -> Outline:
    submitted = {
        shard.name: decision.buddies_of(decision.node_of(rank).node_id)
        for rank, receipt in enumerate(receipts)
        for shard in receipt.shards
        if shard.is_submitted or shard.name in helpers_by_shard
    }
    return Outline(manifest, submitted, decision.placement.copies, config.on_degraded == "raise", helpers_by_shard)


def lay_out(
    decision: SaveDecision,
    shards: Mapping[str, ShardEntry],
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    layouts: CachedLayouts,
    parts: Parts,
) -> tuple[CachedLayout | None, CachedLayout]:
    """Adds the items' places to the metadata. Returns the layout of the previous save, if it is the same, and this
    save's.
    """
    same = layouts.find_layout(metadata, results)
    if same is None:
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
    else:
        metadata.storage_data = dict(same.places)
    metadata.storage_meta = StorageMeta()  # equal for equal layouts: the manifest names the save
    version = metadata_version()
    if version is not None:
        metadata.version = version
    paths = {info.relative_path for info in metadata.storage_data.values()} if same is None else same.shards
    # A rank that wrote nothing of what it planned would make a checkpoint that no load can read.
    unwritten = paths - set(shards)
    if unwritten:
        raise SaveAborted(f"No rank has reported {sorted(unwritten)} as written for save {decision.save_id}.")
    if same is not None:
        return same, replace(same, save_id=decision.save_id, checkpoint_id=decision.checkpoint_id)
    share_parts(metadata)
    left, dropped = without_optimizer(metadata, parts) or (None, ())
    raw, weights = encode_metadata_file(metadata), b"" if left is None else encode_metadata_file(left)
    return None, CachedLayout.of(decision.save_id, decision.checkpoint_id, metadata, results, raw, weights, dropped)


def _make_manifest(
    decision: SaveDecision,
    copies: int,
    shards: Mapping[str, ShardEntry],
    metadata: Metadata,
    layout: CachedLayout,
    notes: Mapping[str, Any],
    parts: Parts,
) -> tuple[bytes, Manifest]:
    raw_metadata, upload, weights = _add_for_bucket(layout, metadata, decision, parts)
    metadata.storage_meta = StorageMeta(checkpoint_id=decision.checkpoint_id, save_id=decision.save_id)
    manifest = Manifest(
        save_id=decision.save_id,
        checkpoint_id=decision.checkpoint_id,
        sequence=decision.sequence,
        created_unix_s=time.time(),
        world_size=len(decision.node_by_rank),
        copies=copies,
        metadata_bytes=len(raw_metadata),
        metadata_crc32c=crc32c(raw_metadata),
        nodes=tuple(
            NodeEntry(node.node_id, node.host, node.domain, decision.ranks_of(node.node_id), node.boot_id)
            for node in decision.nodes
        ),
        shards=shards,
        upload=upload,
        lineage=decision.lineage,
        notes=notes,
        weights=weights,
    )
    return raw_metadata, manifest


def _add_for_bucket(
    layout: CachedLayout, metadata: Metadata, decision: SaveDecision, parts: Parts
) -> tuple[bytes, UploadEntry | None, WeightsEntry | None]:
    """The bytes of `.metadata`, and the manifest's entries for its parts: for the bucket, and for the weights alone.

    The bucket has other paths if shards may lie under the save's own prefix.
    """
    plan, raw = decision.upload, layout.raw
    weights = raw[len(raw) - layout.weights :]
    if plan is None or not plan.has_own_prefix:
        upload = None if plan is None else UploadEntry(plan.url, False, len(raw), crc32c(raw), plan.replaces)
        return raw, upload, _describe_weights(weights, b"", layout.dropped)
    prefix = own_prefix(decision.save_id)
    paths = {info.relative_path: prefix + info.relative_path for info in metadata.storage_data.values()}
    elsewhere = {
        index: replace(info, relative_path=paths[info.relative_path]) for index, info in metadata.storage_data.items()
    }
    shared = dict(layout.described)  # in which equal parts are the same object
    there = replace(metadata, state_dict_metadata=shared, storage_data=elsewhere)
    left = without_optimizer(there, parts) if weights else None
    bucket_weights = b"" if left is None else encode_metadata(left[0])
    bucket = encode_metadata(there) + bucket_weights
    upload = UploadEntry(plan.url, True, len(bucket), crc32c(bucket), plan.replaces)
    return raw + bucket, upload, _describe_weights(weights, bucket_weights, layout.dropped)


def _describe_weights(weights: bytes, in_bucket: bytes, dropped: tuple[str, ...]) -> WeightsEntry | None:
    if not weights:
        return None
    return WeightsEntry(len(weights), crc32c(weights + in_bucket), len(in_bucket), crc32c(in_bucket), dropped)


def _make_shard_entries(decision: SaveDecision, receipts: Sequence[Receipt]) -> Mapping[str, ShardEntry]:
    """The entry of each shard. Its intended holders: the nodes that acknowledged it and, if too few, other buddies."""
    entries = {}
    for rank, receipt in enumerate(receipts):
        own = decision.node_of(rank).node_id
        for shard in receipt.shards:
            holders = intended_holders(shard.holders, decision.buddies_of(own), decision.placement.copies)
            entries[shard.name] = ShardEntry(shard.size_bytes, shard.crc32c, rank, own, holders)
    return entries


def _check_reached(manifest: Manifest, committed: Committed, *, must_have_all: bool) -> None:
    have = {name: len(committed.holders_of(name)) for name in manifest.shards}
    wanted = min(manifest.copies, len(manifest.nodes)) if must_have_all else 1
    short = {name: count for name, count in have.items() if count < wanted}
    # Decided, but not published with enough copies: the caller must not count on them yet.
    if short or not committed.held_by_node:
        why = "; ".join(f"node {node}: {error}" for node, error in committed.error_by_node.items())
        raise AckNotReached(
            manifest.copies, short, _describe_outcome(manifest, committed, why), _hint_for(committed.error_by_node)
        )


def _hint_for(silent: Collection[str]) -> str | None:
    """The next step if nodes did not publish a decided save."""
    nodes = " and ".join(f"node {node}" for node in sorted(silent))
    comes = "the next save or load publishes the checkpoint; until then the previous one loads"
    return f"Bring back {nodes}: {comes}." if nodes else None


def _describe_outcome(manifest: Manifest, committed: Committed, why: str) -> str:
    """What happens to a decided save that some nodes have not published."""
    nodes = sorted(committed.error_by_node)
    return (
        f"The decision of save {manifest.save_id} is durable on the coordinator's node. Node {', '.join(nodes)} publishes "
        f"the save once it reaches a node that has published it, unless a newer save of {manifest.checkpoint_id!r} is "
        f"complete by then. Until every shard is published, the previous version is kept, too. {why}"
    )
