"""DCP's load planner, but that a rank's own item may be absent: the checkpoint is one of another number of ranks."""

from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt.dcp.rank_state.items import find_world, worlds_under


class SavedElsewhere(tuple[int, ...]):
    """In the place of a rank's own item that was not saved: the numbers of ranks of which there are items."""

    __slots__ = ()


class RankStatePlanner(DefaultLoadPlanner):
    """Loads as DCP's own does. A RankState that was saved by another number of ranks gets no error of DCP's, but its rule.

    CheckpointManager uses it; `dcp.load` is passed it as `planner=`. Arguments as of DefaultLoadPlanner.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            return
        saved = metadata.state_dict_metadata
        for name in [name for name in self.state_dict if find_world(name) is not None and name not in saved]:
            prefix, _, own = name.rpartition(".")
            holder = state_dict.get(prefix)
            if isinstance(holder, dict) and own in holder:
                del self.state_dict[name]
                holder[own] = SavedElsewhere(worlds_under(prefix, saved))
