"""The place of a save in the order of all saves, and whether it goes to the bucket: the coordinator's last decisions."""

from dataclasses import replace

from replicated_ckpt.dcp.cluster import Cluster, Opened
from replicated_ckpt.dcp.decision import SaveDecision
from replicated_ckpt.dcp.object_tier import ObjectTier
from replicated_ckpt.errors import CheckpointExists


def numbered(
    decision: SaveDecision, opened: Opened, object_tier: ObjectTier, seen_sequence: int, cluster: Cluster
) -> tuple[SaveDecision, list[str]]:
    """The decision with its sequence, larger than any on the nodes, in the bucket or seen before; and what is weaker.

    Raises:
        CheckpointExists: the bucket holds the checkpoint, and the save may not overwrite it; it is given up.
    """
    sequence = max(opened.sequence_max, seen_sequence) + 1
    decision = replace(decision, unreached=opened.unreached, sequence=sequence)
    if not object_tier.takes(sequence):
        return decision, []
    try:
        found = object_tier.probed(decision.checkpoint_id, replaces=opened.replaces, overwrite=decision.overwrite)
    except CheckpointExists as exc:
        cluster.abort(decision.save_id, str(exc))
        raise
    decision = replace(decision, sequence=max(sequence, found.sequence_max + 1), upload=found.plan)
    return decision, [f"{found.problem} The copies on the nodes are made"] if found.problem else []
