"""DCP's load planner, but that two things may be absent: a rank's own item, and state that an optimizer did not have."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from replicated_ckpt.core.one_line import one_line
from replicated_ckpt.dcp.planning.matched_state import OptimizerMatch
from replicated_ckpt.dcp.rank_state.items import find_world, worlds_under
from replicated_ckpt.errors import ConfigInvalid


class SavedElsewhere(tuple[int, ...]):
    """In the place of a rank's own item that was not saved: the numbers of ranks of which there are items."""

    __slots__ = ()


class RankStatePlanner(DefaultLoadPlanner):
    """Loads as DCP's own does, with two exceptions. Any other missing key is DCP's error.

    A RankState, at any level of the state dict, that was saved by another number of ranks follows its own rule.

    An optimizer from `get_optimizer_state_dict`, at any level, is loaded as it was saved. A parameter that had no state, as
    no gradient had come to it, is given an empty one. State that a new optimizer does not ask for is loaded as well.

    CheckpointManager uses it; `dcp.load` is passed it as `planner=`. Arguments as of DefaultLoadPlanner.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        saved = {} if metadata is None else metadata.state_dict_metadata
        self._match = OptimizerMatch({} if metadata is None else state_dict, saved)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is None:
            return
        for name in [name for name in self.mappings if find_world(name) is not None and name not in saved]:
            *path, own = self.mappings[name]
            holder = _find(state_dict, path)
            value = holder.get(own) if isinstance(holder, dict) else None
            if isinstance(value, bytes | tuple):  # of a SavedElsewhere of an earlier load DCP makes a plain tuple
                del self.state_dict[name]
                holder[own] = SavedElsewhere(worlds_under(name.rpartition(".")[0], saved))

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """As DefaultLoadPlanner.

        Raises:
            ConfigInvalid: a parameter has no optimizer state, as the optimizer that was saved did not have the parameter.
        """
        super().load_bytes(read_item, value)
        path = self.mappings.get(read_item.dest_index.fqn, ())
        if self._match.lacking.get(path):
            unknown = self._match.lacking[path].difference(_find(self.original_state_dict, path))
            if unknown:
                names = one_line(", ".join(sorted(map(str, unknown))), 300)
                raise ConfigInvalid(
                    f"The optimizer in the checkpoint has no parameter {names}.",
                    "Make the optimizer with the parameters that it was saved with, in the same groups.",
                )


def _find(tree: Any, path: Sequence[Any]) -> Any:
    """What lies there in a nested state dict; None: a key on the way is no string, which DCP's paths do not tell."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else tree[key] if isinstance(tree, list) else None
    return tree
