"""One small world: three or four nodes, two versions of one checkpoint, and every step that can happen next.

When a world begins, the second version is being saved: its shards are written on every node, and its coordinator, node
0, is about to decide. Each step of the protocol is one step here: a message, a publication, an answer to a question,
the death of a rank or an agent, the start of an agent, a round of re-protection. `rules` makes the decisions of the
nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, Protocol

from replicated_ckpt.core.protocol.settlement import Answer, Fate
from tests.fault.small_worlds.mending import Runs, planned_for

OLD, NEW = 0, 1
VERSIONS = (OLD, NEW)


class Place(IntEnum):
    """The state of a version on a node."""

    NONE = 0
    STAGED = 1
    DECIDED = 2
    NAMED = 3
    REPLACED = 4


class Node(NamedTuple):
    """One node. `is_locked`: a rank there holds the lock of the new save. `places` and `shards` (bits) are by version.

    `heard`: the answers of the other nodes so far, while this node settles the new save.
    """

    is_up: bool
    is_locked: bool
    places: tuple[Place, Place]
    shards: tuple[int, int]
    heard: tuple[tuple[int, Answer], ...] = ()


class State(NamedTuple):
    """All nodes, and the progress of the save. `told`: the coordinator's knowledge of each node (see TOLD), empty
    before it has decided. `is_acknowledged`: the new version is acknowledged.

    `is_aborted`: the coordinator's node has a record that it aborted the new version.
    """

    nodes: tuple[Node, ...]
    told: tuple[int, ...] = ()
    is_over: bool = False
    is_acknowledged: bool = False
    is_aborted: bool = False


UNTOLD, TOLD, PUBLISHED, FAILED = range(4)
"""The coordinator's knowledge of a node: nothing sent yet, has the decision, has published, has failed."""


class Rules(Protocol):
    """The decisions of the protocol. Nodes are numbers. `runs`: the lineage of each version."""

    runs: Runs

    def settle(self, own: int, count: int, *, is_worked_on: bool, answers: dict[int, Answer]) -> Fate: ...

    def may_publish(self, version: int, published: int | None, *, is_opened: bool) -> bool: ...

    def keeps_replaced(self) -> bool: ...

    def may_drop(self, old: int, whole: frozenset[int], published: int | None) -> bool: ...

    def aborts_when_asked(self) -> bool: ...


@dataclass(frozen=True)
class Layout:
    """Which shards (bits) each node holds of a complete save: pairs of nodes, or a ring."""

    placed: tuple[int, ...]

    @cached_property
    def whole(self) -> int:
        """All shards."""
        whole = 0
        for shards in self.placed:
            whole |= shards
        return whole


RING = Layout((0b101, 0b011, 0b110))
PAIRS = Layout((0b0011, 0b0011, 0b1100, 0b1100))
Step = tuple[str, State]


def first(layout: Layout, *, adopting: int | None = None, away: int | None = None) -> State:
    """The first state: the old version is published and acknowledged, and the new one is written.

    `adopting`: this node has lost the old version and adopts it again. The old decision is staged there, and may be
    published at any time. `away`: this node was away when the new version was opened.
    """
    nodes = []
    for node, shards in enumerate(layout.placed):
        has_old = node != adopting
        old = Place.NAMED if has_old else Place.DECIDED
        new = Place.NONE if node == away else Place.STAGED
        nodes.append(Node(True, node != away, (old, new), (shards if has_old else 0, shards * (node != away))))
    return State(tuple(nodes))


class World:
    """The steps that can happen. `may_go_back`: the coordinator's disk may be restored to its state before the save.
    `away`: the node where the new version was not opened.
    """

    def __init__(
        self,
        layout: Layout,
        rules: Rules,
        *,
        is_atomic: bool = False,
        may_go_back: bool = False,
        away: int | None = None,
    ) -> None:
        self.layout = layout
        self.rules = rules
        self.is_atomic = is_atomic
        self.may_go_back = may_go_back
        self.away = away
        self.count = len(layout.placed)

    def steps(self, state: State) -> Iterator[Step]:
        """Every next state, with the name of its step."""
        yield from self._coordinator(state)
        for index, node in enumerate(state.nodes):
            if node.is_up:
                yield f"agent of {index} dies", self.with_node(state, index, node._replace(is_up=False, heard=()))
                yield from self._settle(state, index)
                yield from self._background(state, index)
            else:
                yield f"agent of {index} starts", self._started(state, index)
            if node.is_locked:
                yield f"rank of {index} dies", self.with_node(state, index, node._replace(is_locked=False))

    def disasters(self, state: State) -> Iterator[Step]:
        """Next states that no rule can prevent, as a disk loses its contents.

        Questions in flight end meanwhile, as they wait for seconds only.
        """
        if self.may_go_back and not state.nodes[0].is_up and not state.nodes[0].is_locked:
            shards = (self.layout.placed[0], 0)
            back = Node(is_up=False, is_locked=False, places=(Place.NAMED, Place.NONE), shards=shards)
            others = tuple(node._replace(heard=()) for node in state.nodes[1:])
            yield "disk of 0 is restored", state._replace(nodes=(back, *others), is_aborted=False)

    def with_node(self, state: State, index: int, node: Node) -> State:
        return state._replace(nodes=(*state.nodes[:index], node, *state.nodes[index + 1 :]))

    # The coordinator ---------------------------------------------------------------------------------------------

    def _coordinator(self, state: State) -> Iterator[Step]:
        if state.is_over or not state.nodes[0].is_locked:
            return
        if not state.told:
            first = state.nodes[0]
            if first.places[NEW] is Place.STAGED:
                decided = first._replace(places=(first.places[OLD], Place.DECIDED), heard=())
                yield "decide", self.with_node(state, 0, decided)._replace(told=(TOLD, *[UNTOLD] * (self.count - 1)))
            return
        for index, known in enumerate(state.told):
            if known == UNTOLD:
                yield from self._tell(state, index)
            elif known == TOLD:
                yield from self._order(state, index)
        if all(known in (PUBLISHED, FAILED) for known in state.told):
            yield "end", self._ended(state)

    def _tell(self, state: State, index: int) -> Iterator[Step]:
        """The decision is sent to a node. It is lost if the node is down or has dropped the save."""
        node = state.nodes[index]
        if node.is_up and node.places[NEW] in (Place.STAGED, Place.DECIDED):
            decided = node._replace(places=(node.places[OLD], Place.DECIDED), heard=())
            yield f"tell {index}", self._known(self.with_node(state, index, decided), index, TOLD)
        yield f"tell {index} in vain", self._known(state, index, FAILED)

    def _order(self, state: State, index: int) -> Iterator[Step]:
        """A node with the decision is asked to publish. Its answer may be lost."""
        after = self._published(state, index, NEW) if state.nodes[index].is_up else None
        if after is not None:
            yield f"publish {index}", self._known(after, index, PUBLISHED)
            yield f"publish {index}, unheard", self._known(after, index, FAILED)
        yield f"order {index} in vain", self._known(state, index, FAILED)

    @staticmethod
    def _known(state: State, index: int, known: int) -> State:
        return state._replace(told=(*state.told[:index], known, *state.told[index + 1 :]))

    def _ended(self, state: State) -> State:
        """The save returns. It is acknowledged if nodes that confirmed their publication hold every shard."""
        seen = 0
        for index, known in enumerate(state.told):
            if known == PUBLISHED:
                seen |= self.layout.placed[index]
        state = self.with_node(state, 0, state.nodes[0]._replace(is_locked=False))
        return state._replace(is_over=True, is_acknowledged=seen == self.layout.whole, told=())

    # A node ------------------------------------------------------------------------------------------------------

    def _published(self, state: State, index: int, version: int) -> State | None:
        """The state after the node has published a decided version; None if the node may not. The replaced version is
        kept or dropped.
        """
        node = state.nodes[index]
        if node.places[version] is Place.NAMED:
            return state
        if node.places[version] is not Place.DECIDED:
            return None
        other = NEW if version == OLD else OLD
        named = other if node.places[other] is Place.NAMED else None
        if not self.rules.may_publish(version, named, is_opened=index != self.away):
            return None
        places, shards = list(node.places), list(node.shards)
        places[version] = Place.NAMED
        if named is not None:
            is_needed = self.rules.keeps_replaced() and shards[version] != self.layout.whole
            places[other] = Place.REPLACED if is_needed else Place.NONE
            shards[other] = shards[other] if is_needed else 0
        after = node._replace(places=(places[0], places[1]), shards=(shards[0], shards[1]), heard=())
        return self.with_node(state, index, after)

    def _started(self, state: State, index: int) -> State:
        """An agent that starts publishes the decided versions on its disk."""
        state = self.with_node(state, index, state.nodes[index]._replace(is_up=True))
        for version in VERSIONS:
            state = self._published(state, index, version) or state
        return state

    def _dropped(self, state: State, index: int, version: int) -> State:
        node = state.nodes[index]
        places, shards = list(node.places), list(node.shards)
        places[version], shards[version] = Place.NONE, 0
        after = node._replace(places=(places[0], places[1]), shards=(shards[0], shards[1]), heard=())
        is_aborted = state.is_aborted or (index == 0 and version == NEW)
        return self.with_node(state, index, after)._replace(is_aborted=is_aborted)

    # Settling ----------------------------------------------------------------------------------------------------

    def _settle(self, state: State, index: int) -> Iterator[Step]:
        """A node asks the others one by one, and may act on the answers so far at any time."""
        node = state.nodes[index]
        if node.places[NEW] is not Place.STAGED:
            return
        others = [other for other in range(self.count) if other != index and state.nodes[other].is_up]
        if self.is_atomic:
            yield f"{index} settles", self.settled(state, index, others)
            for other in others:
                yield f"{index} settles with {other}", self.settled(state, index, [other])
            yield f"{index} settles alone", self.settled(state, index, [])
            return
        for other in others:
            if other not in dict(node.heard):
                yield f"{index} asks {other}", self._asked(state, index, other)
        yield f"{index} settles", self._acted(state, index)

    def settled(self, state: State, index: int, others: list[int]) -> State:
        """The node asks these nodes at once, and acts."""
        for other in others:
            state = self._asked(state, index, other)
        return self._acted(state, index)

    def _asked(self, state: State, index: int, other: int) -> State:
        state = self._published(state, other, NEW) or state
        answer, node = self._answer(state.nodes[other]), state.nodes[other]
        if answer is Answer.STAGED and node.is_locked:
            answer = Answer.WORKING
        elif answer is Answer.STAGED and other == 0 and self.rules.aborts_when_asked():
            state, answer = self._dropped(state, other, NEW), Answer.ABORTED
        elif answer is Answer.ABSENT and other == 0 and state.is_aborted and self.rules.aborts_when_asked():
            answer = Answer.ABORTED
        heard = tuple(sorted({**dict(state.nodes[index].heard), other: answer}.items()))
        return self.with_node(state, index, state.nodes[index]._replace(heard=heard))

    @staticmethod
    def _answer(node: Node) -> Answer:
        return {
            Place.NONE: Answer.ABSENT,
            Place.STAGED: Answer.STAGED,
            Place.DECIDED: Answer.DECIDED,
            Place.NAMED: Answer.PUBLISHED,
            Place.REPLACED: Answer.PUBLISHED,
        }[node.places[NEW]]

    def _acted(self, state: State, index: int) -> State:
        node = state.nodes[index]
        answers = dict(node.heard)
        fate = self.rules.settle(index, self.count, is_worked_on=node.is_locked, answers=answers)
        if fate is Fate.COMPLETE:
            decided = node._replace(places=(node.places[OLD], Place.DECIDED), heard=())
            state = self.with_node(state, index, decided)
            return self._published(state, index, NEW) or state
        if fate is Fate.DROP:
            return self._dropped(state, index, NEW)
        return self.with_node(state, index, node._replace(heard=()))

    # Re-protection -----------------------------------------------------------------------------------------------

    def _background(self, state: State, index: int) -> Iterator[Step]:
        for gone in (False, True):
            yield f"{index} protects ({'gone' if gone else 'assumed'})", self.protected(state, index, are_gone=gone)
        if state.nodes[index].places[OLD] is Place.DECIDED:
            yield f"{index} publishes what it adopts", self._published(state, index, OLD) or state

    def protected(self, state: State, index: int, *, are_gone: bool) -> State:
        """One round of re-protection: the node drops superseded versions, and adopts and copies what is missing. Nodes
        that do not answer count as gone, or are assumed to hold their shards.
        """
        whole = self.whole(state)
        named = self._named(state.nodes[index])
        is_opened = index != self.away
        for version in VERSIONS:
            place = state.nodes[index].places[version]
            is_superseded = (
                place is Place.DECIDED
                and named is not None
                and not self.rules.may_publish(version, named, is_opened=is_opened)
            )
            if (place is Place.REPLACED or is_superseded) and self.rules.may_drop(version, whole, named):
                state = self._dropped(state, index, version)
        return self._mended(state, index, are_gone=are_gone)

    def whole(self, state: State) -> frozenset[int]:
        """The versions of which nodes that answer hold every shard, published or replaced."""
        found = []
        for version in VERSIONS:
            seen = 0
            for node in state.nodes:
                if node.is_up and node.places[version] in (Place.NAMED, Place.REPLACED):
                    seen |= node.shards[version]
            if seen == self.layout.whole:
                found.append(version)
        return frozenset(found)

    @staticmethod
    def _named(node: Node) -> int | None:
        return next((version for version in VERSIONS if node.places[version] is Place.NAMED), None)

    def _mended(self, state: State, index: int, *, are_gone: bool) -> State:
        actions = planned_for(self.layout.placed, visible(state), index, self.rules.runs, are_gone=are_gone)
        for version, shards in actions:
            node = state.nodes[index]
            if shards == 0:
                state = self._adopted(state, index, version)
            elif node.places[version] in (Place.NAMED, Place.REPLACED):
                held = list(node.shards)
                held[version] |= shards
                state = self.with_node(state, index, node._replace(shards=(held[0], held[1])))
        return state

    def _adopted(self, state: State, index: int, version: int) -> State:
        """The node stages manifest and metadata of a version that another node has. It publishes the old version in a
        later step.
        """
        node = state.nodes[index]
        if node.places[version] not in (Place.NONE, Place.STAGED):
            return state
        other = NEW if version == OLD else OLD
        if node.places[other] is Place.NAMED and other > version:
            return state
        places = list(node.places)
        places[version] = Place.DECIDED
        state = self.with_node(state, index, node._replace(places=(places[0], places[1]), heard=()))
        return state if version == OLD else self._published(state, index, version) or state


Visible = tuple[tuple[bool, tuple[Place, Place], tuple[int, int]], ...]


def visible(state: State) -> Visible:
    """The state that re-protection sees: that of all nodes that answer."""
    return tuple(
        (True, node.places, node.shards) if node.is_up else (False, (Place.NONE, Place.NONE), (0, 0))
        for node in state.nodes
    )
