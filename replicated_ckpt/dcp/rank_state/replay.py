"""A data loader that goes on in the middle of an epoch: it reads the epoch's first batches again, and throws them away."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from replicated_ckpt.dcp.rank_state.rank_state import capture_random, restore_random
from replicated_ckpt.dcp.runtime.caller import warn

_ITERATIONS, _PLAIN = "_num_iter_calls", "_dataloader"
"""Of a loader of Lightning's Fabric: the count of its iterations, its sampler's epoch; and the plain loader in it."""


class ReplayedLoader(Stateful):
    """Any loader, with `state_dict` and `load_state_dict`. What else is asked of it, the loader itself answers.

    After a load, the next iteration yields what the saved one would have yielded next. A loader with a `state_dict` of its
    own (torchdata's) goes on by that. Any other one is set to the random states with which the epoch began, and
    reads as many batches as were yielded then: those cost the time of reading them. The process's generators are
    afterwards as they were before. If all of an epoch was yielded, the next iteration is a new epoch.

    One iteration at a time. Call `set_epoch` of a sampler before the next batch is asked for. After a load, another epoch
    than the saved one is warned of. Loaders of Lightning's Fabric call it themselves, and go on with the saved epoch.
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

    def start_workers(self) -> None:
        """Starts those that outlive an epoch."""
        iter(getattr(self.loader, _PLAIN, self.loader))

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
            "iterations": getattr(self.loader, _ITERATIONS, None),
            "has_workers": self._has_workers(),
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
        self._start |= {"iterations": getattr(self.loader, _ITERATIONS, None), "has_workers": self._has_workers()}
        self._is_begun = True
        return iter(self.loader)

    def _yield_from(self, batches: Iterator[Any]) -> Iterator[Any]:
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
                f"A data loader goes on with its sampler at epoch {now!r}, and was saved at epoch {saved!r}: the order of "
                "its samples may differ. Call set_epoch with the saved epoch before the first batch."
            )

    def _loader_and_samplers(self) -> list[Any]:
        """However they are wrapped in each other; each once."""
        found: dict[int, Any] = {}
        holders: list[Any] = [self.loader]
        while holders:
            holder = holders.pop()
            if holder is None or id(holder) in found:
                continue
            found[id(holder)] = holder
            holders += [getattr(holder, "batch_sampler", None), getattr(holder, "sampler", None)]
        return list(found.values())

    def _epochs(self) -> list[Any]:
        """What the samplers were told by `set_epoch`."""
        return [
            each.epoch for each in self._loader_and_samplers() if hasattr(each, "set_epoch") and hasattr(each, "epoch")
        ]

    def _has_workers(self) -> bool:
        """Whether workers that outlive an epoch were started; those get their seed once, from the process's generator."""
        return self._is_begun and bool(getattr(self.loader, "persistent_workers", False))

    def _return_to(self, state: dict[str, Any]) -> None:
        """Starts workers that had been started there, and sets Fabric's counter. Older versions saved neither."""
        if state.get("has_workers") and not self._has_workers() and not self.has_own_state():
            own = self._capture_own()
            self.start_workers()
            self._is_begun = True
            self._set_own(own)
        if state.get("iterations") is not None:
            setattr(self.loader, _ITERATIONS, state["iterations"])

    def _generators(self) -> list[torch.Generator]:
        """Those that were given to the loader and its samplers, each once."""
        found = [getattr(each, "generator", None) for each in self._loader_and_samplers()]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _capture_own(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_own(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)
