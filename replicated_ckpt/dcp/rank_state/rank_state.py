"""The state of each rank, saved with a checkpoint: random generators, and the position of data loaders."""

import io
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from operator import index
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from replicated_ckpt.dcp.objects.weights_only import load_object, warn_if_unloadable
from replicated_ckpt.dcp.planning.matched_state import OptimizerMatch
from replicated_ckpt.dcp.runtime.user_code import warn
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt, ReplicatedCkptError
from replicated_ckpt.wording import one_line


class SavedElsewhere(tuple[int, ...]):
    """Stands for a rank's own item that was not saved. Its elements are the world sizes for which such items were saved."""

    __slots__ = ()


class RankStatePlanner(DefaultLoadPlanner):
    """Loads as DCP's own planner, with two exceptions. Any other missing key is DCP's error.

    A RankState that another number of ranks saved is loaded by its own rule, `on_other_world`.

    An optimizer state from `get_optimizer_state_dict` is loaded as it was saved. A parameter that had no state, because
    it had no gradient yet, gets an empty state. State that a new optimizer does not ask for is loaded, too.

    Both may lie at any level of the state dict. CheckpointManager uses this planner. Pass it to `dcp.load` as
    `planner=`. Arguments are those of DefaultLoadPlanner.
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
            if isinstance(value, bytes | tuple):  # DCP made a plain tuple of an earlier load's SavedElsewhere
                del self.state_dict[name]
                holder[own] = SavedElsewhere(worlds_under(name.rpartition(".")[0], saved))

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """As DefaultLoadPlanner.

        Raises:
            ConfigInvalid: a parameter has no optimizer state, because the saved optimizer did not have the parameter.
        """
        super().load_bytes(read_item, value)
        path = self.mappings.get(read_item.dest_index.fqn, ())
        if self._match.lacking.get(path):
            # A parameter that the saved optimizer listed had no state yet; any other is unknown to the checkpoint.
            unknown = self._match.lacking[path].difference(_find(self.original_state_dict, path))
            if unknown:
                names = one_line(", ".join(sorted(map(str, unknown))), 300)
                raise ConfigInvalid(
                    f"The optimizer in the checkpoint has no parameter {names}.",
                    "Make the optimizer with the parameters that it was saved with, in the same groups.",
                )


def _find(tree: Any, path: Sequence[Any]) -> Any:
    """The value at this path of a nested state dict. None: a key on the way is not a string, so DCP has no path to it."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else tree[key] if isinstance(tree, list) else None
    return tree


_MT19937_WORDS, _PHILOX_WORDS = 624, 4


def capture_random() -> dict[str, Any]:
    """The states of all generators now. CUDA's are included if this process has used CUDA."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, list(words), gauss),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    # Asking for its generators would initialise CUDA, and take its memory on every GPU.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Sets the states from `capture_random`. CUDA devices that this machine does not have are skipped.

    Raises:
        ObjectCorrupt: a generator refuses its state, which no `capture_random` made. Those before it are set.
    """
    try:
        version, words, gauss = states["python"]
        # Before any is set: numpy itself would read beyond its words.
        _check_positions(states["numpy"])
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        for device, state in enumerate(states.get("cuda", ())):
            if device < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, device)
    # A forged state fails in the generators' own code in any of these ways.
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as exc:
        detail = f"they are not states of generators: {type(exc).__name__}: {exc}"
        raise ObjectCorrupt(
            "this checkpoint", "load the random states of this rank from", "", one_line(detail, 300)
        ) from exc


def _check_positions(state: dict[str, Any]) -> None:
    """Raises ValueError for a position beyond a generator's words: numpy does not check it, and would read there.

    Source: numpy 2.3, _mt19937.pyx and _philox.pyx.
    """
    position, buffered = state["state"].get("pos", 0), state.get("buffer_pos", 0)
    if not (0 <= index(position) <= _MT19937_WORDS and 0 <= index(buffered) <= _PHILOX_WORDS):
        raise ValueError(f"a generator of numpy cannot stand at position {position}, {buffered}")


_NAME = re.compile(r"(?:.*\.)?rank-[0-9]+-of-([0-9]+)", re.DOTALL)


def name_rank_item(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}"


def find_world(name: str) -> int | None:
    """The number of ranks of the job that saved this item; None if it is not an item of one rank."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def worlds_under(prefix: str, names: Iterable[str]) -> tuple[int, ...]:
    """The world sizes for which items exist under a prefix."""
    found = {find_world(name) for name in names if name.startswith(f"{prefix}.") and "." not in name[len(prefix) + 1 :]}
    return tuple(sorted(world for world in found if world is not None))


def pack(value: Any, name: str) -> bytes:
    """The value as `torch.save` writes it. Warns of classes that `unpack` would refuse by default."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    raw = buffer.getvalue()
    warn_if_unloadable(memoryview(raw), name)
    return raw


def unpack(raw: bytes, name: str, *, trust_pickles: bool = False) -> Any:
    """The value from `pack`. With `trust_pickles` its pickle may run code.

    Raises:
        ObjectUnsafe: it names a class that is not allowed.
    """
    if trust_pickles:
        return torch.load(io.BytesIO(raw), weights_only=False)
    return load_object(memoryview(raw), name, "this checkpoint")


OnOtherWorld = Literal["raise", "keep"]
_RANDOM = "random"
_NOT_OURS = "Load a checkpoint whose state has a RankState at this place, or leave it out of the loaded state."


class WorldSizeChanged(ReplicatedCkptError):
    """Another number of ranks saved this RankState. Tensors, and entries before it in the state dict, are loaded."""

    default_hint = (
        'Start as many ranks as saved. Or pass RankState(on_other_world="keep"): generators and data loaders '
        "then stay as the program set them."
    )

    def __init__(self, saved: Sequence[int], now: int) -> None:
        by = " or ".join(str(world) for world in saved)
        had = f"The checkpoint has a RankState of each of {by} ranks" if by else "The checkpoint has no RankState"
        super().__init__(f"{had}, and {now} {'rank loads' if now == 1 else 'ranks load'} it.")
        self.args = (tuple(saved), now)
        self.saved = tuple(saved)
        self.now = now


class RankState(Stateful):
    """The random generators of this rank (Python, numpy, torch, CUDA), and `parts` with a `state_dict`, as one item.

        state = {"app": app, "rank": RankState(data=StatefulDataLoader(...))}
        manager.save(step, state)

    If as many ranks load as saved, each rank gets the state of the rank with its number. Everything is set at the end
    of the load. Code that draws random numbers between the load and the next step must also run in a job that was not
    interrupted.

    Args:
        on_other_world: if another number of ranks loads it. "raise": WorldSizeChanged, after tensors and entries before
            it in the state dict are loaded. "keep": generators and parts stay as they are, and rank 0 warns once per
            load.
        trust_pickles: a part's state may name any class. Anyone who can write the checkpoint can then run code here.
        parts: by name, the objects that each rank saves for itself, such as data loaders or samplers.

    With `dcp.load` pass `planner=RankStatePlanner()`. Without it, DCP itself raises an error for another number of
    ranks.
    """

    def __init__(
        self, *, on_other_world: OnOtherWorld = "raise", trust_pickles: bool = False, **parts: Stateful
    ) -> None:
        if on_other_world not in ("raise", "keep"):
            raise ConfigInvalid(f'on_other_world must be "raise" or "keep", not {on_other_world!r}.')
        lacking = [name for name, part in parts.items() if not isinstance(part, Stateful)]
        if lacking:
            raise ConfigInvalid(
                f"Parts of a RankState need state_dict and load_state_dict. These lack them: {', '.join(lacking)}.",
                "Wrap a plain DataLoader in ReplayedLoader, or use torchdata's StatefulDataLoader.",
            )
        if _RANDOM in parts:
            raise ConfigInvalid(
                f"A part of a RankState must not be called {_RANDOM!r}: the random generators have that name.",
                "Rename the part.",
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
            WorldSizeChanged: another number of ranks saved it, and on_other_world is "raise".
            ObjectUnsafe: a part's state names a class that is not allowed. ConfigInvalid: the saved parts have other
                names.
            ObjectCorrupt: no RankState wrote it, or a generator refuses its state.
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
                f"The checkpoint has {_list_names(saved.keys() - {_RANDOM})} of this rank, but this RankState has "
                f"{_list_names(self._parts)}.",
                "Make the RankState with the same parts as in the save.",
            )
        # Parts before generators: a data loader draws numbers while it is set.
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
    """Rank and world size of the job; (0, 1) without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _own_name() -> str:
    return name_rank_item(*rank_and_world())


def _list_names(names: Any) -> str:
    return one_line(", ".join(sorted(map(str, names)))) or "no parts"


_OWN, _FIRST = "rank", "first"


def entries_of(value: Any) -> dict[str, Any]:
    """The entries that this rank passes to `dcp.save` for `value`: one under this rank's name, on rank 0 also one under
    `first`.
    """
    rank, world = rank_and_world()
    packed = pack(value, name_rank_item(rank, world))
    return {_OWN: {name_rank_item(rank, world): packed}, **({_FIRST: packed} if rank == 0 else {})}


def find_own(names: Iterable[str]) -> frozenset[str]:
    """The names among these that only this rank has: of a RankState, and of rank 0's value from `entries_of`."""
    names = frozenset(names)
    own = {name for name in names if find_world(name) is not None}
    holders = (name.rpartition(".")[0] for name in own)
    return names & own.union(f"{holder.removesuffix(_OWN)}{_FIRST}" for holder in holders if holder.endswith(_OWN))


def wanted_entries() -> dict[str, Any]:
    """The entries for a value that `dcp.load` fills with a RankStatePlanner."""
    return {_OWN: {name_rank_item(*rank_and_world()): b""}, _FIRST: b""}


def values_in(state: Mapping[str, Any], *, trust_pickles: bool) -> tuple[Any, Any]:
    """This rank's value after a load, and rank 0's. The first is None if another number of ranks saved it.

    Raises:
        ObjectUnsafe: a value names a class that is not allowed.
    """
    name = name_rank_item(*rank_and_world())
    own = state[_OWN][name]
    first = unpack(state[_FIRST], name, trust_pickles=trust_pickles)
    return (unpack(own, name, trust_pickles=trust_pickles) if isinstance(own, bytes) else None), first
