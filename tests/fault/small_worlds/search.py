"""The search of all states that a small world can reach, with the invariants of each state and of each step."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fault.small_worlds.world import NEW, OLD, Node, Place, State, World

HEALING_ROUNDS = 12
_CameBy = dict[State, tuple[State, str] | None]
LOST = Node(is_up=False, is_locked=False, places=(Place.NONE, Place.NONE), shards=(0, 0))


@dataclass
class Found:
    """The result of a search. `broken`: the broken invariant, or "". `trace`: the steps that led to it."""

    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    broken: str = ""
    trace: tuple[str, ...] = ()
    acknowledged: int = 0
    dropped: int = 0


@dataclass
class Search:
    """One search. `states_max`: the search ends after so many states.

    `by_outcome_alone`: only the loss of an acknowledged checkpoint is checked, not the invariants of single steps.
    `loses_a_disk`: in each state, any one node may also be lost for ever with its disk. Both versions had their copies.
    """

    world: World
    states_max: int | None = None
    by_outcome_alone: bool = False
    loses_a_disk: bool = False
    _healed: dict[tuple[tuple[Node, ...], bool, int | None], State] = field(default_factory=dict)

    def run(self, first: State) -> Found:
        """Visits all states, breadth first."""
        found, began = Found(), time.monotonic()
        came_by: _CameBy = {first: None}
        queue = deque([first])
        while queue and not found.broken:
            state = queue.popleft()
            found.acknowledged += state.is_acknowledged
            found.broken = self.broken_in(state)
            if found.broken:
                found.trace = tuple(_trace(came_by, state))
                break
            for name, after in self.world.steps(state):
                found.steps += 1
                if after is state or after == state:
                    continue
                changed = [pair for pair in zip(state.nodes, after.nodes, strict=True) if pair[0] is not pair[1]]
                found.dropped += sum(_is_dropped(was, now, NEW) for was, now in changed)
                if not self.by_outcome_alone:
                    found.broken = self.broken_by(state, after, changed)
                if found.broken:
                    found.trace = (*_trace(came_by, state), name)
                    break
                _reach(after, (state, name), came_by, queue)
            for name, after in self.world.disasters(state):
                _reach(after, (state, name), came_by, queue)
            if self.states_max is not None and len(came_by) >= self.states_max:
                break
        found.states, found.seconds = len(came_by), time.monotonic() - began
        return found

    # Invariants -------------------------------------------------------------------------------------------------

    def broken_by(self, before: State, after: State, changed: list[tuple[Node, Node]]) -> str:
        """The invariant that this step breaks, or "". `changed` has the changed nodes, before and after."""
        away = self.world.away
        if away is not None and after.nodes[away].places[OLD] is not Place.NAMED:
            return "I3a: another run's version loses its name on a node where it was not overwritten"
        for was, now in changed:
            if was.places == now.places:
                continue
            if _is_dropped(was, now, OLD) and NEW not in self.world.whole(before) | self.world.whole(after):
                return "I1: a node drops the old version, and the new one is not complete"
            if _is_dropped(was, now, NEW) and can_be_published(before):
                return "I1: a node drops the new version, which is published or can be"
            if was.places[NEW] is Place.NAMED and now.places[OLD] is Place.NAMED:
                return "I4: the old version takes the name of the new one"
        return ""

    def broken_in(self, state: State) -> str:
        """The invariant that breaks once all nodes are back: the version acknowledged last, or a newer one, must be
        complete, and no node may have unfinished work.
        """
        healed = self.healed(state)
        whole = self.world.whole(healed)
        wanted = NEW if state.is_acknowledged else OLD
        if not any(version >= wanted for version in whole):
            return f"the version acknowledged last is lost: {sorted(whole)} are complete, wanted is {wanted}"
        for index, node in enumerate(healed.nodes):
            if {Place.STAGED, Place.DECIDED, Place.REPLACED} & set(node.places):
                return f"node {index} is not done: {node}"
            if NEW in whole and node.places[OLD] is Place.NAMED and index != self.world.away:
                return f"node {index} keeps the old version's name: {node}"
        return self.broken_by_a_loss(state) if self.loses_a_disk else ""

    def broken_by_a_loss(self, state: State) -> str:
        """The invariant that breaks if one node is lost for ever and the others are back: the version acknowledged
        last, or a newer one, must be complete.
        """
        wanted = NEW if state.is_acknowledged else OLD
        for lost in range(self.world.count):
            whole = self.world.whole(self.healed(state, lost))
            if not any(version >= wanted for version in whole):
                return f"the loss of node {lost} loses version {wanted}: {sorted(whole)} are complete"
        return ""

    def healed(self, state: State, lost: int | None = None) -> State:
        """The state after all agents run except the lost node's, all ranks are gone, and every node has settled and
        re-protected until nothing changes.
        """
        nodes = tuple(
            LOST if index == lost else node._replace(is_up=True, is_locked=False, heard=())
            for index, node in enumerate(state.nodes)
        )
        key = (nodes, state.is_aborted, lost)
        if key not in self._healed:
            living = [index for index in range(self.world.count) if index != lost]
            self._healed[key] = self._heal(state._replace(nodes=nodes, told=(), is_over=True), living)
        return self._healed[key]

    def _heal(self, state: State, living: list[int]) -> State:
        world = self.world
        for index in living:
            state = world._started(state, index)
        for _ in range(HEALING_ROUNDS):
            before = state
            for index in living:
                if state.nodes[index].places[NEW] is Place.STAGED:
                    state = world.settled(state, index, [other for other in living if other != index])
                state = world._published(state, index, OLD) or state
                state = world.protected(state, index, are_gone=True)
            if state == before:
                break
        return state


def can_be_published(state: State) -> bool:
    """Whether the new version is decided on any node, or its coordinator may still decide."""
    if any(node.places[NEW] in (Place.DECIDED, Place.NAMED, Place.REPLACED) for node in state.nodes):
        return True
    first = state.nodes[0]
    return not state.is_over and not state.told and first.is_locked and first.places[NEW] is Place.STAGED


def _is_dropped(was: Node, now: Node, version: int) -> bool:
    return was.places[version] is not Place.NONE and now.places[version] is Place.NONE


def _reach(after: State, by: tuple[State, str], came_by: _CameBy, queue: deque[State]) -> None:
    """Queues a state that is reached for the first time, and records how."""
    if after not in came_by:
        came_by[after] = by
        queue.append(after)


def _trace(came_by: _CameBy, state: State) -> Iterator[str]:
    steps = []
    while (came := came_by[state]) is not None:
        state, name = came
        steps.append(name)
    yield from reversed(steps)
