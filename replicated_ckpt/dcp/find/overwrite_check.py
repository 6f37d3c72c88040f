"""Whether a save with overwrite=False may replace a checkpoint of its name: only one that can no longer be loaded."""

from collections.abc import Iterable

from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.dcp.find.survey import Survey, Surveyor
from replicated_ckpt.errors import CheckpointAmbiguous, CheckpointExists, CheckpointNotFound, ManifestInvalid, ShardLost
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut

_ASK_TIMEOUT_S = 3.0
_OVER = (Answer.PUBLISHED.value, Answer.ABSENT.value)


def check_overwritable(store: LocalStore, own_node: str, nodes: Iterable[AgentAddress], checkpoint_id: str) -> None:
    """Checks that the checkpoint with this name can no longer be loaded. `nodes` are those of the new save.

    The checkpoint may be replaced only if a part is missing although all nodes in its manifest have answered, and none of
    them is still publishing it. A node that does not answer may have the missing part. Nothing else may have the name
    anywhere: no save of another run, and no files that may be of another save.

    Raises:
        CheckpointExists: the checkpoint may not be replaced; the message has the reason.
    """
    met = {peer.node_id: peer for peer in PeerBook(store.agent_directory()).read_all()}
    peers = {**met, **{address.node_id: address for address in nodes}}
    # `expected`: a node of an earlier job that is silent must count as unreached, too.
    surveyor = Surveyor(store, own_node, peers.values(), expected=peers)
    try:
        survey = surveyor.survey(checkpoint_id)
    except (CheckpointAmbiguous, CheckpointNotFound, ManifestInvalid, ShardLost) as exc:
        raise CheckpointExists(
            f"Checkpoint already exists: {checkpoint_id!r} in {store.root}. The nodes that have parts of it are "
            f"unknown: {exc.message}",
            "To replace it, save with ReplicatedWriter(..., overwrite=True). To keep its files, move its directory away on "
            "every node.",
        ) from exc
    _check_may_go(survey, checkpoint_id, store)
    _check_is_alone(survey, surveyor)
    missing = ", ".join(survey.found.list_missing(survey.manifest.shard_sizes)) or "the metadata"
    # Unreachable is not missing: the part may lie there.
    unreached = [*surveyor.unreached, *_unreached_of_manifest(survey, own_node), *_publishing(survey, own_node)]
    # Another process may still publish the rest here: then the checkpoint would be whole.
    if store.is_staged(survey.manifest.save_id):
        unreached.append("this node, which still publishes it")
    if unreached:
        raise CheckpointExists(
            f"Checkpoint {checkpoint_id!r} exists, but not all of it was found. Missing: {missing}. A node or bucket that "
            f"was not reached may have it: {'; '.join(unreached)}.",
            "Make these reachable again. Or replace the old checkpoint: save with ReplicatedWriter(..., overwrite=True).",
        )


def _check_may_go(survey: Survey, checkpoint_id: str, store: LocalStore) -> None:
    """Raises for a checkpoint that is whole, that stock torch wrote, or that may lie in a bucket."""
    if survey.is_whole or survey.unmanaged_warning:
        raise CheckpointExists(f"Checkpoint already exists: {checkpoint_id!r} in {store.root}.")
    # The bucket was not asked: if the upload has ended, the checkpoint is whole there.
    upload = survey.manifest.upload
    if upload is not None:
        raise CheckpointExists(
            f"Checkpoint {checkpoint_id!r} exists: the nodes have a part of it, and {upload.url} may have all of it.",
            "Load it from the bucket. Or replace it: save with ReplicatedWriter(..., overwrite=True).",
        )


def _check_is_alone(survey: Survey, surveyor: Surveyor) -> None:
    """Raises if another save has this name: that one would be overwritten, too, and was not checked."""
    manifest = survey.manifest
    others = [save for save in surveyor.saves if save.version.lineage != manifest.lineage]
    unknown = [each for each in surveyor.unclaimed if not each.sizes or each.sizes.keys() - each.matching(manifest)]
    found = [
        *(f"save {save.save_id} of another run on node {', '.join(_nodes_of(save))}" for save in others),
        *(f"files on node {each.node_id} without a readable manifest" for each in unknown),
        *surveyor.newer.describe_all(),
    ]
    if found:
        raise CheckpointExists(
            f"Checkpoint {manifest.checkpoint_id!r} exists, but is not complete, and other files have this name: "
            f"{'; '.join(found)}.",
            "Save under another id, or move those files away. ReplicatedWriter(..., overwrite=True) replaces both the "
            "checkpoint and the files.",
        )


def _nodes_of(save: SaveFound) -> list[str]:
    return sorted({holding.node_id for holding in save.holdings})


def _unreached_of_manifest(survey: Survey, own_node: str) -> list[str]:
    """Nodes of the checkpoint that did not answer, or whose address no rank has."""
    answered = {own_node, *(address.node_id for address in survey.addresses)}
    return [f"node {node.node_id} ({node.host})" for node in survey.manifest.nodes if node.node_id not in answered]


def _publishing(survey: Survey, own_node: str) -> list[str]:
    """Nodes on which the save is still staged: it may become complete there."""
    by_node = {address.node_id: address for address in survey.addresses if address.node_id != own_node}

    def ask(node: str) -> str:
        with AgentClient(by_node[node], _ASK_TIMEOUT_S) as client:
            return str(client.call("GET", f"/v1/saves/{survey.manifest.save_id}").get("state"))

    outcome = FanOut.run(by_node, ask)
    staged = [by_node[node].label for node, state in outcome.results.items() if state not in _OVER]
    return [*staged, *(f"{by_node[node].label}: {error.message}" for node, error in outcome.errors.items())]
