"""The plan of a repair as values: damage found, files that nodes get, replace or set aside, and those that must wait."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from operator import index
from typing import Any, TypeAlias

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.wording import describe_way_out, one_line


@dataclass(frozen=True)
class RestoreManifest:
    """A node gets the manifest and the metadata of a save. It does not have the save, or has lost these files.

    `sources` answer and have an intact manifest or intact metadata; those with both come first.
    """

    node_id: str
    checkpoint_id: str
    save_id: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"node {self.node_id}: copy {self.checkpoint_id} (manifest, metadata) from {', '.join(self.sources)}"


@dataclass(frozen=True)
class CopyShard:
    """A node gets a copy of a shard. Its own damaged copy is set aside once the new one is complete.

    `sources` answer and have a copy; those with an intact one come first. If no copy is intact, each block comes from any
    node with an intact block, including the node itself.
    """

    node_id: str
    checkpoint_id: str
    save_id: str
    shard: str
    size_bytes: int
    sources: tuple[str, ...]
    replaces_damaged: bool = False

    def __str__(self) -> str:
        what = "replace the damaged" if self.replaces_damaged else "copy"
        others = [node for node in self.sources if node != self.node_id]
        return (
            f"node {self.node_id}: {what} {self.checkpoint_id}/{self.shard} ({self.size_bytes} bytes) "
            f"from {', '.join(others) or 'its own data'}"
        )


@dataclass(frozen=True)
class SetAside:
    """A node moves a shard that the manifest does not name out of the checkpoint, into the quarantine."""

    node_id: str
    checkpoint_id: str
    save_id: str
    shard: str

    def __str__(self) -> str:
        return f"node {self.node_id}: move aside {self.checkpoint_id}/{self.shard}, which its manifest does not name"


Action: TypeAlias = RestoreManifest | CopyShard | SetAside


_SAVE_AGAIN = "all nodes have answered: load what is left, and save it again with overwrite=True"


@dataclass(frozen=True)
class ShortShard:
    """A file with too few intact copies that cannot be repaired now.

    `have` is 0 if no copy is known. `waits_for` are nodes, with their hosts, that do not answer and may have a copy.
    `is_in_doubt`: another save of the same checkpoint is whole, or may be once nodes return. `save_id` is empty if no
    manifest names the file's save. `taken_on` are nodes that accept no copy, because a save of another run is published
    there. In that case `lies_on` are the nodes with files of this save.
    """

    checkpoint_id: str
    save_id: str
    shard: str
    owner: str
    wanted: int
    have: int
    waits_for: tuple[str, ...] = ()
    is_in_doubt: bool = False
    taken_on: tuple[str, ...] = ()
    lies_on: tuple[str, ...] = ()

    @property
    def is_lost(self) -> bool:
        return self.have == 0 and not self.is_in_doubt

    def __str__(self) -> str:
        unsure = f", of save {self.save_id}; another save of it can be loaded" if self.is_in_doubt else ""
        waits = f"; bring back node {' or node '.join(self.waits_for)}" if self.waits_for else ""
        taken = f"; another run's save has its name on node {' and node '.join(self.taken_on)}" if self.taken_on else ""
        advice = f"; {describe_way_out(self.checkpoint_id, self.save_id, self.lies_on)}" if self.taken_on else ""
        if self.is_in_doubt and not self.waits_for and not self.taken_on:
            advice = f"; {_SAVE_AGAIN}"
        have = f"{self.have} of {self.wanted} copies" if self.save_id else "on no node that answers"
        return f"{self.checkpoint_id}/{self.shard} (owner {self.owner}){unsure}: {have}{waits}{taken}{advice}"


@dataclass(frozen=True)
class RepairPlan:
    """The actions, in this order, and the files that cannot be repaired now."""

    restore: tuple[RestoreManifest, ...] = ()
    copy: tuple[CopyShard, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    short: tuple[ShortShard, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every file of every checkpoint is intact and has all its copies, on the nodes that were seen.

        The only definition of "done" (I5): re-protection, its status, `verify` and `repair` use it.
        """
        return not self.actions and not self.short

    @property
    def actions(self) -> tuple[Action, ...]:
        return (*self.restore, *self.copy, *self.set_aside)

    @property
    def lost(self) -> tuple[ShortShard, ...]:
        return tuple(shard for shard in self.short if shard.is_lost)

    def concerns(self, checkpoint_id: str, name: str) -> bool:
        """Whether the plan has an action or a short entry for this file on any node."""
        entries: tuple[CopyShard | SetAside | ShortShard, ...] = (*self.copy, *self.set_aside, *self.short)
        return any((entry.checkpoint_id, entry.shard) == (checkpoint_id, name) for entry in entries)

    def of_node(self, node_id: str) -> "RepairPlan":
        return RepairPlan(
            tuple(action for action in self.restore if action.node_id == node_id),
            tuple(action for action in self.copy if action.node_id == node_id),
            tuple(action for action in self.set_aside if action.node_id == node_id),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RepairPlan":
        """The actions of a plan from `to_json`, without the short files.

        Raises:
            KeyError, TypeError, ValueError: the fields are no plan; the caller names the peer that sent them.
        """
        return cls(
            tuple(RestoreManifest(**_texts(entry), sources=_nodes(entry)) for entry in fields["restore"]),
            tuple(
                CopyShard(
                    **_texts(entry, "shard"),
                    size_bytes=index(entry["size_bytes"]),
                    sources=_nodes(entry),
                    replaces_damaged=bool(entry["replaces_damaged"]),
                )
                for entry in fields["copy"]
            ),
            tuple(SetAside(**_texts(entry, "shard")) for entry in fields.get("set_aside", ())),
        )


def _texts(entry: Mapping[str, Any], *more: str) -> dict[str, Any]:
    return {name: str(entry[name]) for name in ("node_id", "checkpoint_id", "save_id", *more)}


def _nodes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(node) for node in entry["sources"])


def is_of_held_save(action: RestoreManifest, holdings: Collection[Holding]) -> bool:
    """Whether the node already has files of that save: the action only restores parts of it."""
    return any((held.checkpoint_id, held.save_id) == (action.checkpoint_id, action.save_id) for held in holdings)


def refuse_unplanned(
    asked: Sequence[RestoreManifest], own_plan: Sequence[RestoreManifest]
) -> frozenset[RestoreManifest]:
    """The requested restores that are not in the node's own plan: they could replace one save by another.

    Another node may always request copies of shards.
    """
    # A stale or hostile plan of another node must not replace a newer save here.
    planned = {(action.node_id, action.checkpoint_id, action.save_id) for action in own_plan}
    return frozenset(one for one in asked if (one.node_id, one.checkpoint_id, one.save_id) not in planned)


class Problem(Enum):
    CORRUPT = "corrupt"
    """Its bytes differ from the checksum of the save."""
    MISSING = "missing"
    """The node is an intended holder and lacks the file."""
    UNKNOWN = "unknown"
    """The manifest of its checkpoint does not name the file."""


@dataclass(frozen=True)
class Finding:
    """One defective file on one node. `save_id` is empty if the manifest itself is invalid."""

    node_id: str
    checkpoint_id: str
    save_id: str
    name: str
    path: str
    problem: Problem
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.problem.value}: {self.path} on node {self.node_id}: expected {self.expected}, found {self.found}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problem": self.problem.value}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Finding":
        """Raises ValueError, KeyError, TypeError: the fields are no finding; the caller names the peer."""
        names = ("node_id", "checkpoint_id", "save_id", "name", "path", "expected", "found")
        text = {name: one_line(fields[name]) for name in names}
        return cls(**text, problem=Problem(fields["problem"]))
