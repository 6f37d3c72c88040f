"""What a rank has for itself, saved with a checkpoint: random generators, and whatever says where its data stands."""

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from replicated_ckpt.core.one_line import one_line
from replicated_ckpt.dcp.rank_state.items import name_rank_item, pack, unpack
from replicated_ckpt.dcp.rank_state.planner import SavedElsewhere
from replicated_ckpt.dcp.rank_state.random_state import capture_random, restore_random
from replicated_ckpt.dcp.runtime.caller import warn
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt, ReplicatedCkptError

OnOtherWorld = Literal["raise", "keep"]
_RANDOM = "random"
_NOT_OURS = "Load a checkpoint whose state had a RankState at this place, or leave it out of the state that is loaded."


class WorldSizeChanged(ReplicatedCkptError):
    """A RankState was saved by another number of ranks. Tensors are loaded by then, and what has keys before its own."""

    default_hint = (
        'Start as many ranks as saved, or pass RankState(on_other_world="keep"): generators and data then stay as the '
        "program set them."
    )

    def __init__(self, saved: Sequence[int], now: int) -> None:
        by = " or ".join(str(world) for world in saved)
        had = f"The checkpoint has what each of {by} ranks had for itself" if by else "The checkpoint has no RankState"
        super().__init__(f"{had}, and {now} {'rank loads' if now == 1 else 'ranks load'} it.")
        self.args = (tuple(saved), now)
        self.saved = tuple(saved)
        self.now = now


class RankState(Stateful):
    """The random generators of this rank (Python, numpy, torch, CUDA), and `parts` with a `state_dict`, as one item.

        state = {"app": app, "rank": RankState(data=StatefulDataLoader(...))}
        manager.save(step, state)

    After a load by as many ranks as saved, each rank has what the rank of its number had. Everything is set at the end of
    the load, so what draws random numbers between that and the next step has to do so in an undisturbed run as well.

    Args:
        on_other_world: another number of ranks loads it. "raise": WorldSizeChanged; tensors are loaded by then, and
            what has keys that sort before its own. "keep": generators and parts stay as they are, and rank 0 warns once
            per load.
        trust_pickles: a part's state may name any class; a writer of the checkpoint runs code here.
        parts: by name, what each rank saves for itself: data loaders, samplers, a counter. A part is loaded by its name.

    With `dcp.load` pass `planner=RankStatePlanner()`: without it, DCP itself raises for another number of ranks.
    """

    def __init__(
        self, *, on_other_world: OnOtherWorld = "raise", trust_pickles: bool = False, **parts: Stateful
    ) -> None:
        if on_other_world not in ("raise", "keep"):
            raise ConfigInvalid(f'on_other_world must be "raise" or "keep", not {on_other_world!r}.')
        lacking = [name for name, part in parts.items() if not isinstance(part, Stateful)]
        if lacking or _RANDOM in parts:
            raise ConfigInvalid(
                f"Parts of a RankState have state_dict and load_state_dict, and are not called {_RANDOM!r}: "
                f"{', '.join(lacking or [_RANDOM])}.",
                "A plain DataLoader has neither: wrap it in ReplayedLoader, or take torchdata's StatefulDataLoader.",
            )
        self._on_other_world = on_other_world
        self._trust_pickles = trust_pickles
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """One item, under a name that only this rank of a job of this size has."""
        name = _own_name()
        parts = {part: value.state_dict() for part, value in self._parts.items()}
        return {name: pack({_RANDOM: capture_random(), **parts}, name)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets parts, then generators.

        Raises:
            WorldSizeChanged: another number of ranks saved it, and that is not to be kept silent.
            ObjectUnsafe: a part's state names a class that nothing allows. ConfigInvalid: the parts are other ones.
            ObjectCorrupt: it is no RankState's, or a generator does not take its state.
        """
        name = _own_name()
        item = state_dict.get(name)
        if not isinstance(item, bytes):
            self._meet_other_world(item if isinstance(item, SavedElsewhere) else ())
            return
        saved = unpack(item, name, trust_pickles=self._trust_pickles)
        if not isinstance(saved, dict) or _RANDOM not in saved:
            raise ObjectCorrupt(
                "this checkpoint", "load", name, "its bytes are intact, but no RankState wrote them", _NOT_OURS
            )
        if saved.keys() - {_RANDOM} != self._parts.keys():
            raise ConfigInvalid(
                f"The checkpoint has {_list_names(saved.keys() - {_RANDOM})} of this rank, and this RankState has "
                f"{_list_names(self._parts)}.",
                "Make the RankState with the parts that it was saved with.",
            )
        for part, value in self._parts.items():
            value.load_state_dict(saved[part])
        restore_random(saved[_RANDOM])

    def _meet_other_world(self, worlds: tuple[int, ...]) -> None:
        rank, world = rank_and_world()
        error = WorldSizeChanged(worlds, world)
        if self._on_other_world == "raise":
            raise error
        if rank == 0:
            warn(f"{error.message} Random generators, and {_list_names(self._parts)}, stay as they are on each rank.")


def rank_and_world() -> tuple[int, int]:
    """Of the job; (0, 1) without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _own_name() -> str:
    return name_rank_item(*rank_and_world())


def _list_names(names: Any) -> str:
    return one_line(", ".join(sorted(map(str, names)))) or "no parts"
