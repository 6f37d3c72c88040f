"""The oracle: a deliberately simple memory of what was acknowledged and who was hit since, and what must load now."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from tests.fault.torture.contents import State, contents


class Violation(AssertionError):
    """A promise of the package was broken."""


@dataclass
class Acknowledged:
    """A save that returned. `hit`: nodes lost or damaged since it had all its copies; `discounted`: out of reach then."""

    attempt: int
    checkpoint_id: str
    copies: int
    wanted: int
    hit: set[int] = field(default_factory=set)
    discounted: set[int] = field(default_factory=set)

    def is_safe(self, out_of_reach: Collection[int]) -> bool:
        """Whether fewer nodes than there are copies have been lost, damaged or put out of reach."""
        return len((self.hit | set(out_of_reach)) - self.discounted) < self.copies


class Oracle:
    """Knows the attempts by number, in the order in which they were made."""

    def __init__(self) -> None:
        self.newest: dict[str, Acknowledged] = {}
        self._open: dict[str, set[int]] = {}
        self._ranks: dict[int, int] = {}
        self._number = 0

    def began(self, checkpoint_id: str, ranks: int) -> int:
        """A save begins; returns the number of the attempt."""
        self._number += 1
        self._ranks[self._number] = ranks
        self._open.setdefault(checkpoint_id, set()).add(self._number)
        return self._number

    def acknowledged(
        self, checkpoint_id: str, attempt: int, *, copies: int, wanted: int, unpublished: Collection[int]
    ) -> None:
        """The save returned; nothing that was under that id before may be found any more."""
        self._open[checkpoint_id] = {attempt}
        self.newest[checkpoint_id] = Acknowledged(attempt, checkpoint_id, copies, wanted, set(unpublished))

    def hit(self, node: int) -> None:
        """A node lost or may have lost something."""
        for save in self.newest.values():
            save.hit.add(node)
            save.discounted.discard(node)

    def protected(self, out_of_reach: Collection[int], nodes_up: int) -> None:
        """Every node that is up said that everything has its copies: what was hit before counts no more."""
        for save in (
            found for found in self.newest.values() if found.is_safe(out_of_reach)
        ):  # nobody mends what is gone
            save.hit.clear()
            save.discounted = set(out_of_reach)
            save.copies = min(save.wanted, nodes_up)

    def possible(self, checkpoint_id: str) -> set[int]:
        """Attempts that may be found under an id: the last acknowledged one, and every later one that did not return."""
        last = self.newest.get(checkpoint_id)
        return {number for number in self._open.get(checkpoint_id, ()) if last is None or number >= last.attempt}

    def check_bytes(self, checkpoint_id: str, attempt: int, state: State) -> None:
        """Raises Violation: what was loaded is not bit for bit what one possible attempt saved."""
        if attempt not in self._ranks:
            raise Violation(f"{checkpoint_id}: loaded attempt {attempt}, which never was")
        wanted = contents(attempt, self._ranks[attempt])
        if state.keys() != wanted.keys() or not all(torch.equal(state[name], wanted[name]) for name in wanted):
            raise Violation(f"{checkpoint_id}: wrong bytes of attempt {attempt}")

    def safe(self, out_of_reach: Collection[int]) -> list[Acknowledged]:
        """What must load now, newest first."""
        found = [save for save in self.newest.values() if save.is_safe(out_of_reach)]
        return sorted(found, key=lambda save: -save.attempt)
