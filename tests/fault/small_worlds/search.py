"""The search: every state that a small world can come to, with what must hold in each and for each step."""

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
    """What a search came to. `broken`: what did not hold, and the steps that led there; "" if all held."""

    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    broken: str = ""
    trace: tuple[str, ...] = ()
    acknowledged: int = 0
    dropped: int = 0


@dataclass
class Search:
    """One search. `states_max`: it ends after so many states, if there are more.

    `by_outcome_alone`: what a step must not do is not looked at, only what becomes of what was acknowledged.
    `loses_a_disk`: in each state any one node may be lost for ever with its disk, too; both versions had their copies.
    """

    world: World
    states_max: int | None = None
    by_outcome_alone: bool = False
    loses_a_disk: bool = False
    _healed: dict[tuple[tuple[Node, ...], bool, int | None], State] = field(default_factory=dict)

    def run(self, first: State) -> Found:
        """Goes through all states, those first that few steps lead to."""
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

    # What must hold ----------------------------------------------------------------------------------------------

    def broken_by(self, before: State, after: State, changed: list[tuple[Node, Node]]) -> str:
        """What a step must not do. `changed` are the nodes that it changes, before and after."""
        away = self.world.away
        if away is not None and after.nodes[away].places[OLD] is not Place.NAMED:
            return "I3a: another run's version loses its name where it was not overwritten"
        for was, now in changed:
            if was.places == now.places:
                continue
            if _is_dropped(was, now, OLD) and NEW not in self.world.whole(before) | self.world.whole(after):
                return "I1: a node drops the old version, and the new one was not seen whole"
            if _is_dropped(was, now, NEW) and can_be_published(before):
                return "I1: a node drops the new version, and it is published, or can be"
            if was.places[NEW] is Place.NAMED and now.places[OLD] is Place.NAMED:
                return "I4: the old version takes the name of the new one"
        return ""

    def broken_in(self, state: State) -> str:
        """With all nodes back for long enough, what was acknowledged last loads, or what is newer; nothing is half done."""
        healed = self.healed(state)
        whole = self.world.whole(healed)
        wanted = NEW if state.is_acknowledged else OLD
        if not any(version >= wanted for version in whole):
            return f"what was acknowledged last is lost: whole are {sorted(whole)}, wanted is {wanted}"
        for index, node in enumerate(healed.nodes):
            if {Place.STAGED, Place.DECIDED, Place.REPLACED} & set(node.places):
                return f"node {index} is not done: {node}"
            if NEW in whole and node.places[OLD] is Place.NAMED and index != self.world.away:
                return f"node {index} keeps the old version's name: {node}"
        return self.broken_by_a_loss(state) if self.loses_a_disk else ""

    def broken_by_a_loss(self, state: State) -> str:
        """With any one node lost for ever and the others back, what was acknowledged last loads, or what is newer."""
        wanted = NEW if state.is_acknowledged else OLD
        for lost in range(self.world.count):
            whole = self.world.whole(self.healed(state, lost))
            if not any(version >= wanted for version in whole):
                return f"the loss of node {lost} loses version {wanted}: whole are {sorted(whole)}"
        return ""

    def healed(self, state: State, lost: int | None = None) -> State:
        """All agents but that of a lost node run, all ranks are gone, and each node settles and protects until nothing
        changes."""
        nodes = tuple(
            LOST if index == lost else node._replace(is_up=True, is_locked=False, heard=())
            for index, node in enumerate(state.nodes)
        )
        key = (nodes, state.is_given_up, lost)
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
    """Whether the new version is decided anywhere, or its coordinator may still decide."""
    if any(node.places[NEW] in (Place.DECIDED, Place.NAMED, Place.REPLACED) for node in state.nodes):
        return True
    first = state.nodes[0]
    return not state.is_over and not state.told and first.is_locked and first.places[NEW] is Place.STAGED


def _is_dropped(was: Node, now: Node, version: int) -> bool:
    return was.places[version] is not Place.NONE and now.places[version] is Place.NONE


def _reach(after: State, by: tuple[State, str], came_by: _CameBy, queue: deque[State]) -> None:
    """Notes how a state was come to first; it is looked at in its turn."""
    if after not in came_by:
        came_by[after] = by
        queue.append(after)


def _trace(came_by: _CameBy, state: State) -> Iterator[str]:
    steps = []
    while (came := came_by[state]) is not None:
        state, name = came
        steps.append(name)
    yield from reversed(steps)
