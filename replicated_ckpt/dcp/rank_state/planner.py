"""DCP's load planner, but that a rank's own item may be absent: the checkpoint is one of another number of ranks."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt.dcp.rank_state.items import find_world, worlds_under


class SavedElsewhere(tuple[int, ...]):
    """In the place of a rank's own item that was not saved: the numbers of ranks of which there are items."""

    __slots__ = ()


class RankStatePlanner(DefaultLoadPlanner):
    """Loads as DCP's own does. A RankState that was saved by another number of ranks gets no error of DCP's, but its rule.

    It may lie at any level of the state dict.

    CheckpointManager uses it; `dcp.load` is passed it as `planner=`. Arguments as of DefaultLoadPlanner.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            return
        saved = metadata.state_dict_metadata
        for name in [name for name in self.mappings if find_world(name) is not None and name not in saved]:
            *path, own = self.mappings[name]
            holder = _find(state_dict, path)
            if isinstance(holder, dict) and isinstance(
                holder.get(own), bytes | tuple
            ):  # DCP makes a plain tuple of ours
                del self.state_dict[name]
                holder[own] = SavedElsewhere(worlds_under(name.rpartition(".")[0], saved))


def _find(tree: Any, path: Sequence[str | int]) -> Any:
    """What lies there in a nested state dict; None: a key on the way is no string, which DCP's paths do not tell."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else tree[key] if isinstance(tree, list) else None
    return tree
