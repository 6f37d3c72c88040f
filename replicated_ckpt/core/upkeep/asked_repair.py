"""What another node asks this one to take over: only what this one would by its own look. Copies it may always ask for."""

from collections.abc import Collection, Sequence

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.upkeep.repair_plan import RestoreManifest


def is_of_held_save(action: RestoreManifest, holdings: Collection[Holding]) -> bool:
    """Whether the node holds that very save: it only gets back what its own manifest describes."""
    return any((held.checkpoint_id, held.save_id) == (action.checkpoint_id, action.save_id) for held in holdings)


def refuse_unplanned(
    asked: Sequence[RestoreManifest], own_plan: Sequence[RestoreManifest]
) -> frozenset[RestoreManifest]:
    """Those of the actions asked for that the node's own plan has not: they would put one save in another's place."""
    planned = {(action.node_id, action.checkpoint_id, action.save_id) for action in own_plan}
    return frozenset(one for one in asked if (one.node_id, one.checkpoint_id, one.save_id) not in planned)
