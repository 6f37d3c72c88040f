"""A data loader that goes on in the middle of an epoch: it reads the epoch's first batches again, and throws them away."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from replicated_ckpt.dcp.rank_state.random_state import capture_random, restore_random


class ReplayedLoader(Stateful):
    """Any loader, with `state_dict` and `load_state_dict`. What else is asked of it, the loader itself answers.

    After a load, the next iteration yields what the saved one would have yielded next. A loader with a `state_dict` of its
    own (torchdata's) goes on by that. Any other one is set to the random states with which the epoch began, and
    reads as many batches as were yielded then: those cost the time of reading them. The process's generators are
    afterwards as they were before. If all of an epoch was yielded, the next iteration is a new epoch.

    One iteration at a time. A sampler with `set_epoch` is to be told the epoch before the next batch is asked for.
    """

    asks_for_more = True
    """Whether the loop asks for a batch after the last one, as `for` does."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._yielded = 0
        self._is_exhausted = False
        self._start: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is unpickled there is none
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError, as of the loader, if it has no length

    def __iter__(self) -> Iterator[Any]:
        """Batches. After a load the loader is asked for its iterator with the first batch, otherwise now."""
        return self._yield_from(self._begin()) if self._loaded is None else self._go_on()

    def has_own_state(self) -> bool:
        """Whether the loader says itself where it stands."""
        return isinstance(self.loader, Stateful)

    def count_read_ahead(self) -> int:
        """Batches that were yielded and not used yet."""
        return 0

    def is_epoch_over(self) -> bool:
        """Whether the next batch will be one of a new epoch; after a load, of the next one after that which was saved."""
        if self._loaded is not None:
            return bool(self._loaded["is_over"])
        try:
            return self._is_exhausted or self._yielded >= len(self)
        except TypeError:
            return self._is_exhausted

    def state_dict(self) -> dict[str, Any]:
        """How far it is read, and the random states with which that reading began."""
        if self._loaded is not None:  # nothing was asked for since the load
            return self._loaded
        ahead = self.count_read_ahead()
        state: dict[str, Any] = {
            "yielded": self._yielded - ahead,
            "is_over": not ahead and self.is_epoch_over(),
            "is_exhausted": self._is_exhausted,
            "start": self._start,
            "generators": self._capture_own(),
        }
        if self.has_own_state():
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration goes on there."""
        self._loaded = state_dict
        if "loader" in state_dict:
            self.loader.load_state_dict(state_dict["loader"])  # type: ignore[attr-defined]  # it had a state then

    def _begin(self) -> Iterator[Any]:
        """A new epoch."""
        self._yielded, self._is_exhausted = 0, False
        self._start = {"asked": capture_random(), "generators": self._capture_own()}
        return iter(self.loader)

    def _yield_from(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._start.setdefault("first", capture_random())
        for batch in batches:
            self._yielded += 1
            yield batch
        self._is_exhausted = True

    def _go_on(self) -> Iterator[Any]:
        assert self._loaded is not None
        loaded, self._loaded = self._loaded, None
        now = capture_random()
        self._yielded, self._is_exhausted, self._start = loaded["yielded"], loaded["is_exhausted"], loaded["start"]
        if loaded["is_over"] or not loaded["start"]:
            self._set_own(loaded["generators"])
            self._end_epoch(loaded)
            restore_random(now)
            yield from self._yield_from(self._next_epoch(now) if "loader" in loaded else self._begin())
            return
        batches = self._resume() if "loader" in loaded else self._replay()
        self._set_own(loaded["generators"])
        restore_random(now)
        yield from self._yield_from(batches)

    def _end_epoch(self, loaded: dict[str, Any]) -> None:
        """A sampler with a generator of its own draws from it once more when it is asked for more than there is."""
        is_asked = self.asks_for_more and loaded["start"] and not self._is_exhausted and "loader" not in loaded
        if is_asked and self._generators():
            for _ in self._replay():
                pass

    def _next_epoch(self, now: dict[str, Any]) -> Iterator[Any]:
        """Of a loader that stands, by its own state, where an epoch has ended: some yield what is left of that, nothing."""
        batches = self._begin()
        for first in batches:
            return chain([first], batches)
        restore_random(now)
        return self._begin()

    def _resume(self) -> Iterator[Any]:
        """The iterator of a loader that says itself where it stands; it has drawn what it draws when it is made."""
        return iter(self.loader)

    def _replay(self) -> Iterator[Any]:
        """The epoch's iterator behind the batches that were yielded."""
        restore_random(self._start["asked"])
        self._set_own(self._start["generators"])
        batches = iter(self.loader)
        if self._yielded:
            restore_random(self._start["first"])
        for _ in islice(batches, self._yielded):
            pass
        return batches

    def _generators(self) -> list[torch.Generator]:
        """Those that were given to the loader and its samplers, however they are wrapped in each other; each once."""
        found: list[Any] = []
        holders: list[Any] = [self.loader]
        seen: set[int] = set()
        while holders:
            holder = holders.pop()
            if holder is None or id(holder) in seen:
                continue
            seen.add(id(holder))
            found.append(getattr(holder, "generator", None))
            holders += [getattr(holder, "batch_sampler", None), getattr(holder, "sampler", None)]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _capture_own(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_own(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)
