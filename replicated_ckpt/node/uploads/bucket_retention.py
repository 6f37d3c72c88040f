"""Retention in the bucket: removes saves when a newer one is there, and refuses uploads of saves that it would remove."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from replicated_ckpt.config import Retention
from replicated_ckpt.core.commit_mark import CommitMark
from replicated_ckpt.core.manifest import Manifest, decode_manifest, metrics_of
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.core.upkeep.marks import Marks
from replicated_ckpt.core.upkeep.policy import NodeReport, scope_of
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.retention import Candidate, Verdict, judge
from replicated_ckpt.errors import (
    ManifestInvalid,
    ManifestVersionUnknown,
    ObjectMissing,
    ReplicatedCkptError,
    SaveAborted,
    StoreDenied,
)
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.node.state.upload_book import UploadBook, UploadProgress
from replicated_ckpt.stores.bucket.bucket import Bucket, BucketSave
from replicated_ckpt.stores.bucket.bucket_removal import remove_save, remove_superseded, slim_in_bucket

log = logging.getLogger(__name__)

TOLD_MAX = 16
"""The last uploads that a node still reports after it has removed those saves."""

_REFUSED_MAX = 16
"""After this many refused deletions, the rest waits for the next save."""


def make_node_report(service: NodeService, book: UploadBook, uploads: Mapping[str, UploadProgress]) -> NodeReport:
    """This node's report of its policies and uploads. An upload counts as over only if this agent has seen its end.

    The last ended ones stay in the report after they are retired here: other nodes may not have looked into the bucket yet.
    """
    removed = service.store.journal.read_removed()
    states = {save_id: upload.state for save_id, upload in uploads.items()}
    found = [manifest for name, manifest in service.store.catalog.committed() if name == manifest.checkpoint_id]
    own_url_by_save = {one.save_id: one.upload.url for one in found if one.upload is not None}
    asked = map(book.apply, found)
    url_by_save = {
        one.save_id: one.upload.url for one in asked if one.upload is not None and one.save_id not in removed
    }
    over = [
        save_id
        for save_id, state in states.items()
        if state.state != "pending" and state.url == url_by_save.get(save_id, state.url)  # not of an earlier order
    ]
    wanted = frozenset(url_by_save)
    uploading = wanted.difference(over)
    ordered = frozenset(filter(book.is_ordered, uploading))
    unable = frozenset(save_id for save_id, state in states.items() if state.is_denied) & uploading
    uploaded = frozenset(wanted.intersection(over)).union(over[-TOLD_MAX:])
    # An order may have taken a save to another bucket than its own.
    elsewhere = {one for one in uploaded if own_url_by_save.get(one, states[one].url) != states[one].url}
    absent = frozenset(save_id for save_id in uploaded if uploads[save_id].is_absent) | elsewhere
    saves = uploading, uploaded, ordered, removed, unable, absent
    marks = service.marks.read()
    return NodeReport(service.policies.read_all(), *saves, is_drained=service.is_drained, marks=marks)


def check_wanted(service: NodeService, bucket: Bucket, manifest: Manifest) -> None:
    """Checks that the bucket's policy would keep a save before it is uploaded. If not, its objects there are removed.

    Raises:
        SaveAborted: the policy would not keep it, or this node's user has removed the save. StoreError
    """
    _check_not_removed(service, manifest)
    histories = service.store.catalog.histories(scope_of(manifest.checkpoint_id))
    newest = histories.get(manifest.lineage)
    # The newest save of a run is always wanted: listing the bucket would only cost time.
    if newest is None or manifest.sequence >= newest.sequence:
        return
    marks, metrics = service.marks.read(), metrics_of(manifest.notes)
    is_rejected = marks.is_rejected(manifest.save_id)
    own = Candidate(
        manifest.checkpoint_id, manifest.save_id, manifest.sequence, metrics=metrics, is_rejected=is_rejected
    )
    for verdict in _judge(service.policies, marks, bucket, manifest, own):
        if verdict.save_id == manifest.save_id and not verdict.is_kept:
            remove_save(bucket, manifest.checkpoint_id, manifest.save_id, manifest)
            raise SaveAborted(
                f"The policy of {bucket.client.target.url} would remove {manifest.checkpoint_id!r}: {verdict.rule}.",
                "To have it in a bucket, upload it under another prefix: `replicated-ckpt upload ID --to URL`.",
            )


def withdraw_removed(
    service: NodeService, bucket: Bucket, manifest: Manifest, look: Callable[[], Sequence[NodeView]]
) -> None:
    """Removes a save from the bucket if this node's user has removed it during its upload.

    If another node that answers still has the save, it stays in the bucket.

    Raises:
        SaveAborted: the user has removed it. StoreError: it is still in the bucket.
    """
    try:
        _check_not_removed(service, manifest)
    except SaveAborted:
        # A node whose user has not removed the save still needs the bucket's copy.
        if not any(_keeps(view, manifest.save_id) for view in look()):
            remove_save(bucket, manifest.checkpoint_id, manifest.save_id, manifest)
        raise


def _keeps(view: NodeView, save_id: str) -> bool:
    is_here = any(holding.save_id == save_id for holding in view.holdings or ())
    return view.presence is Presence.UP and is_here and save_id not in view.node_report.removed


def _check_not_removed(service: NodeService, manifest: Manifest) -> None:
    if manifest.save_id in service.store.journal.read_removed():
        raise SaveAborted(
            f"The user of this node removed {manifest.checkpoint_id!r}.",
            "To upload it, put its directory back on this node first.",
        )


def retire_in_bucket(service: NodeService, bucket: Bucket, manifest: Manifest) -> Collection[str]:
    """Applies the bucket's policy, now that this save is there; returns the removed saves. Failures are logged.

    Newest first, so that the checkpoint that was just retired goes even if older ones have a legal hold.
    """
    refusals, gone = list[StoreDenied](), set[str]()
    try:
        for verdict in _judge(service.policies, service.marks.read(), bucket, manifest):
            # A bucket with legal holds refuses each deletion: asking for all of them takes hours.
            if len(refusals) == _REFUSED_MAX or (verdict.is_kept and not verdict.drops_optimizer):
                continue
            try:
                if verdict.drops_optimizer:
                    if slim_in_bucket(bucket, verdict.checkpoint_id, verdict.save_id):
                        log.info("%s keeps only the weights: %s", bucket.client.target.url, verdict)
                elif _remove(bucket, verdict):
                    gone.add(verdict.save_id)
            except StoreDenied as exc:
                refusals.append(exc)
        if refusals:
            raise refusals[0]
    except ReplicatedCkptError as exc:
        log.warning("%s keeps more than its policy allows: %s", bucket.client.target.url, exc)
    return gone


def tidy_after(bucket: Bucket, manifest: Manifest, there: BucketSave) -> None:
    """Removes objects that an interrupted commit has left. Failures are logged."""
    try:
        remove_superseded(bucket, manifest, there)
    except ReplicatedCkptError as exc:
        log.warning("some objects of %s may stay: %s", manifest.checkpoint_id, exc)


def _judge(
    policies: PolicyBook, marks: Marks, bucket: Bucket, manifest: Manifest, *besides: Candidate
) -> Sequence[Verdict]:
    """The verdicts on this run's saves in the bucket, and on those `besides`, by the policy of this node's ranks.

    Empty if there is no policy, or if the run has continued without this node: its policy may have changed.
    """
    policy = policies.of(scope_of(manifest.checkpoint_id), bucket.client.target.url, manifest.lineage)
    if policy is None or policy.retention is None:
        return ()
    there = _list_candidates(bucket, manifest, policy.retention, marks)
    if any(one.sequence > policy.revision for one in there):
        log.info("nothing is removed from %s: its newest saves may have another policy", bucket.client.target.url)
        return ()
    return judge([*besides, *there], policy.retention)


def _list_candidates(bucket: Bucket, manifest: Manifest, retention: Retention, marks: Marks) -> Sequence[Candidate]:
    """The committed saves of the same run. Those without a mark are not ours: they neither count nor are removed.

    Metrics are in the manifests, which are read only if the policy uses a metric.

    Raises:
        ManifestInvalid, StoreError: a manifest cannot be read, so the best save is unknown.
    """
    scope = scope_of(manifest.checkpoint_id)

    def metrics(save: BucketSave) -> Mapping[str, float]:
        if retention.keep_best is None:
            return {}
        return metrics_of(decode_manifest(bucket.manifest_raw(save), bucket.client.target.url).notes)

    def candidate(save: BucketSave, mark: CommitMark) -> Candidate:
        # By the listing, not the manifest: the next slimming then removes the remains of an interrupted one.
        has_optimizer = any(part_of_shard(name) is Part.OPTIMIZER for name in save.sizes)
        is_full = has_optimizer and not mark.is_slim
        named = save.checkpoint_id, save.save_id, mark.sequence
        is_rejected = marks.is_rejected(save.save_id) or save.is_rejected
        return Candidate(
            *named, metrics=metrics(save), is_full=is_full, can_slim=has_optimizer, is_rejected=is_rejected
        )

    return [
        candidate(save, save.mark)
        for save in bucket.saves(scope)
        if save.mark is not None and scope_of(save.checkpoint_id) == scope and save.mark.lineage == manifest.lineage
    ]


def _remove(bucket: Bucket, verdict: Verdict) -> bool:
    """Removes a save; returns whether it is gone, also if it was replaced since the listing. Raises StoreError."""
    there, url = bucket.save_of(verdict.checkpoint_id), bucket.client.target.url
    # The name may belong to a newer save by now, which must not go in its place.
    if there is None or there.save_id != verdict.save_id:
        return True
    with suppress(ManifestInvalid, ObjectMissing):  # a save with a damaged manifest is removed like the others
        try:
            decode_manifest(bucket.manifest_raw(there), url)
        except ManifestVersionUnknown as exc:
            log.warning("%s stays in %s: %s", verdict.checkpoint_id, url, exc)
            return False
    if bucket.save_of(verdict.checkpoint_id) != there:  # replaced since: the newer save stays
        return True
    bucket.remove(there)
    log.info("removed %s (save %s) from %s: %s", verdict.checkpoint_id, verdict.save_id, url, verdict.rule)
    return True
