"""A data loader that continues in the middle of an epoch: it reads the epoch's first batches again, and drops them."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from replicated_ckpt.dcp.rank_state.rank_state import capture_random, restore_random
from replicated_ckpt.dcp.runtime.user_code import warn

_ITERATIONS, _PLAIN = "_num_iter_calls", "_dataloader"
"""Attributes of a loader of Lightning's Fabric: its count of iterations (its sampler's epoch), and the plain loader."""


class ReplayedLoader(Stateful):
    """Wraps any loader, and adds `state_dict` and `load_state_dict`. All other attributes are the loader's own.

    After a load, the next iteration yields the batches that the saved iteration would have yielded next. A loader with
    its own `state_dict` (torchdata's) continues by that state. For any other loader, ReplayedLoader sets the random
    states of the epoch's start, and reads again the batches that were yielded before the save. Afterwards it sets the
    process's generators back. If the saved epoch had ended, the next iteration is a new epoch.

    One iteration at a time. Call a sampler's `set_epoch` before you ask for the next batch. After a load, a warning
    names the epochs if the sampler's epoch differs from the saved one. Loaders of Lightning's Fabric call `set_epoch`
    themselves, and continue with the saved epoch.
    """

    asks_for_more = True
    """Whether the loop asks for a batch after the last one, as `for` does."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._yielded = 0
        self._is_exhausted = False
        self._is_begun = False
        self._start: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet during unpickling: the look-up would recurse without end
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError, as of the loader, if it has no length

    def __iter__(self) -> Iterator[Any]:
        """The batches. The loader makes its iterator now; after a load, when the first batch is asked for."""
        return self._yield_from(self._begin()) if self._loaded is None else self._go_on()

    def has_own_state(self) -> bool:
        """Whether the loader has a state of its own."""
        return isinstance(self.loader, Stateful)

    def start_workers(self) -> None:
        """Starts workers that outlive an epoch."""
        iter(getattr(self.loader, _PLAIN, self.loader))

    def count_read_ahead(self) -> int:
        """The number of batches that were yielded, but not used yet."""
        return 0

    def is_epoch_over(self) -> bool:
        """Whether the next batch begins a new epoch; after a load, whether the saved epoch was over."""
        if self._loaded is not None:
            return bool(self._loaded["is_over"])
        try:
            return self._is_exhausted or self._yielded >= len(self)
        except TypeError:
            return self._is_exhausted

    def state_dict(self) -> dict[str, Any]:
        """The number of batches read, and the random states at the start of the epoch."""
        if self._loaded is not None:  # no batch was asked for since the load
            return self._loaded
        # A loop that prefetches has taken batches that training has not used: they must come again.
        ahead = self.count_read_ahead()
        state: dict[str, Any] = {
            "yielded": self._yielded - ahead,
            "is_over": not ahead and self.is_epoch_over(),
            "is_exhausted": self._is_exhausted,
            "start": self._start,
            "generators": self._capture_own(),
            "iterations": getattr(self.loader, _ITERATIONS, None),
            "has_workers": self._has_workers(),
        }
        if self.has_own_state():
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration continues at the saved position."""
        self._loaded = state_dict
        if "loader" in state_dict:
            self.loader.load_state_dict(state_dict["loader"])  # type: ignore[attr-defined]  # it had a state then

    def _begin(self) -> Iterator[Any]:
        """Begins a new epoch. Returns the loader's iterator."""
        self._yielded, self._is_exhausted = 0, False
        self._start = {"asked": capture_random(), "generators": self._capture_own()}
        self._start |= {"iterations": getattr(self.loader, _ITERATIONS, None), "has_workers": self._has_workers()}
        self._is_begun = True
        return iter(self.loader)

    def _yield_from(self, batches: Iterator[Any]) -> Iterator[Any]:
        # The first batch may be asked for long after the iterator was made: the states differ by then.
        self._start.setdefault("first", capture_random())
        for batch in batches:
            if not self._yielded:
                self._start["epochs"] = self._epochs()
            self._yielded += 1
            yield batch
        self._is_exhausted = True

    def _go_on(self) -> Iterator[Any]:
        assert self._loaded is not None
        loaded, self._loaded = self._loaded, None
        now = capture_random()
        self._yielded, self._is_exhausted, self._start = loaded["yielded"], loaded["is_exhausted"], loaded["start"]
        if loaded["is_over"] or not loaded["start"]:
            # No position to return to: only the generators must be as the saved epoch left them.
            self._set_own(loaded["generators"])
            self._end_epoch(loaded)
            self._return_to(loaded)
            restore_random(now)
            yield from self._yield_from(self._next_epoch(now) if "loader" in loaded else self._begin())
            return
        batches = self._resume() if "loader" in loaded else self._replay()
        self._set_own(loaded["generators"])
        restore_random(now)
        yield from self._yield_from(batches)

    def _end_epoch(self, loaded: dict[str, Any]) -> None:
        """Replays the epoch to its end if the saved loop asked for a batch after the last: samplers then draw once more."""
        is_asked = self.asks_for_more and loaded["start"] and not self._is_exhausted and "loader" not in loaded
        if is_asked and self._generators():
            for _ in self._replay():
                pass

    def _next_epoch(self, now: dict[str, Any]) -> Iterator[Any]:
        """The next epoch of a loader whose own state is at the end of one. Some loaders first yield the rest of that
        epoch, which is empty.
        """
        batches = self._begin()
        for first in batches:
            return chain([first], batches)
        restore_random(now)
        return self._begin()

    def _resume(self) -> Iterator[Any]:
        """The iterator of a loader with its own state. The loader draws random numbers when it makes the iterator."""
        return iter(self.loader)

    def _replay(self) -> Iterator[Any]:
        """The epoch's iterator, moved past the batches that were yielded."""
        self._return_to(self._start)
        restore_random(self._start["asked"])
        self._set_own(self._start["generators"])
        batches = iter(self.loader)
        self._is_begun = True
        if self._yielded:
            restore_random(self._start["first"])
        for place, _ in enumerate(islice(batches, self._yielded)):
            if not place:
                self._compare_epochs()
        return batches

    def _compare_epochs(self) -> None:
        saved, now = self._start.get("epochs"), self._epochs()
        if saved is not None and saved != now:
            warn(
                f"A data loader continues with its sampler at epoch {now!r}, but was saved at epoch {saved!r}: the order "
                "of its samples may differ. Call set_epoch with the saved epoch before the first batch."
            )

    def _loader_and_samplers(self) -> list[Any]:
        """The loader and its samplers, each once, however they wrap each other."""
        found: dict[int, Any] = {}
        holders: list[Any] = [self.loader]
        while holders:
            holder = holders.pop()
            # Samplers may refer to each other in a circle.
            if holder is None or id(holder) in found:
                continue
            found[id(holder)] = holder
            holders += [getattr(holder, "batch_sampler", None), getattr(holder, "sampler", None)]
        return list(found.values())

    def _epochs(self) -> list[Any]:
        """The samplers' epochs, as `set_epoch` set them."""
        return [
            each.epoch for each in self._loader_and_samplers() if hasattr(each, "set_epoch") and hasattr(each, "epoch")
        ]

    def _has_workers(self) -> bool:
        """Whether workers that outlive an epoch were started. They draw their seed once, from the process's generator."""
        return self._is_begun and bool(getattr(self.loader, "persistent_workers", False))

    def _return_to(self, state: dict[str, Any]) -> None:
        """Starts workers if they ran when `state` was saved, and sets Fabric's counter. Older versions saved neither."""
        if state.get("has_workers") and not self._has_workers() and not self.has_own_state():
            # Starting workers draws a seed, which must not move the loader's own generators.
            own = self._capture_own()
            self.start_workers()
            self._is_begun = True
            self._set_own(own)
        if state.get("iterations") is not None:
            setattr(self.loader, _ITERATIONS, state["iterations"])

    def _generators(self) -> list[torch.Generator]:
        """The generators of the loader and its samplers, each once."""
        found = [getattr(each, "generator", None) for each in self._loader_and_samplers()]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _capture_own(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_own(self, states: list[torch.Tensor]) -> None:
        # The loader may have been made with another number of generators than the saved one.
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)
