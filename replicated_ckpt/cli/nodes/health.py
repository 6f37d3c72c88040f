"""What `status` concludes: from the nodes, the checkpoints and this node's agent to one word and its reasons."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.absent import describe_newer
from replicated_ckpt.cli.look.checkpoints import LOST, CheckpointSeen, without_outlived
from replicated_ckpt.cli.look.doubts import WaitingSave
from replicated_ckpt.cli.look.nodes import NodesSeen
from replicated_ckpt.cli.look.table import format_duration
from replicated_ckpt.stores.files.room import Room
from replicated_ckpt.wording import describe_bytes, plural

ROOM_SHARE_MIN = 0.05
"""With less of its file system free, a node's next save may fail."""


@dataclass(frozen=True)
class Health:
    """What is not as it should be, in words, by how bad it is."""

    found: tuple[tuple[ExitCode, str], ...]
    """The worst first."""

    @property
    def code(self) -> ExitCode:
        """0 (good), 1 (degraded), 4 (lost) or 5 (down)."""
        return self.found[0][0] if self.found else ExitCode.OK

    @property
    def word(self) -> str:
        return _WORDS[self.code]

    @property
    def reasons(self) -> list[str]:
        return [why for _, why in self.found]

    @property
    def lines(self) -> list[str]:
        """Each reason behind its word; the word alone if all is well."""
        return [f"{_WORDS[code]}: {why}" for code, why in self.found] or [self.word]


_WORDS = {
    ExitCode.OK: "good",
    ExitCode.FAILED: "degraded",
    ExitCode.SHARD_LOST: "files are lost",
    ExitCode.UNREACHABLE: "down",
}


def judge_health(
    seen: NodesSeen,
    rows: Sequence[CheckpointSeen],
    agent: Mapping[str, Any] | None,
    why_down: str,
    doubts: Sequence[WaitingSave],
) -> Health:
    """`agent`: what this node's agent says of itself, None if nothing, as `why_down` says."""
    rows = without_outlived(rows)
    bad = [(row.state, f"{row.checkpoint_id}: {row.describe_copies(seen)}") for row in rows if not row.is_good]
    found = [(ExitCode.SHARD_LOST, why) for state, why in bad if state == LOST]
    if agent is None:
        found.append((ExitCode.UNREACHABLE, f"this node's agent gives no answer: {why_down}"))
    degraded = [
        *_unwritable(seen),
        *(why for state, why in bad if state != LOST),
        *map(describe_newer, seen.newer),
        *seen.describe_unreached(),
        *_crowded(seen),
        *(f"in doubt: {one.describe(seen)}" for one in doubts),
        *(() if agent is None else _failing(agent)),
    ]
    return Health((*found, *((ExitCode.FAILED, why) for why in degraded)))


def _unwritable(seen: NodesSeen) -> Iterator[str]:
    for node, held in sorted(seen.held.items()):
        if held.room is not None and held.room.write_error:
            what = f"{seen.label(node)}: nothing can be written to its root: {held.room.write_error}"
            yield f"{what}. Saves of its ranks fail, and it takes no copies; look at `dmesg` and `df` there"


def _crowded(seen: NodesSeen) -> Iterator[str]:
    for node, held in sorted(seen.held.items()):
        if held.room is not None and held.room.free_bytes < ROOM_SHARE_MIN * held.room.size_bytes:
            yield f"{seen.label(node)}: {describe_room(held.room)}"


def describe_room(room: Room | None) -> str:
    return "-" if room is None else f"{describe_bytes(room.free_bytes)} of {describe_bytes(room.size_bytes)} free"


def _failing(agent: Mapping[str, Any]) -> Iterator[str]:
    """What this node's agent says that it cannot do."""
    yield from agent.get("twins", ())
    protection = agent["protection"]
    for problem in protection["failed"]:
        yield f"re-protection: {problem}"
    for upload in agent["object_store"]["pending"].values():
        if upload["error"]:
            since = format_duration(upload["failing_s"])
            yield f"upload of {upload['checkpoint_id']} to {upload['url']} fails since {since}: {upload['error']}"


def describe_uploads(agent: Mapping[str, Any]) -> str:
    uploads = agent["object_store"]
    failing = sum(1 for upload in uploads["pending"].values() if upload["error"])
    said = f"{len(uploads['pending'])} on their way, {uploads['done']} done since the agent started"
    return said + (f", {failing} failing" if failing else "")


def describe_protection(agent: Mapping[str, Any]) -> str:
    found = agent["protection"]
    if not found["rounds"]:
        return "it has not looked yet"
    if found["is_complete"]:
        return "every checkpoint had its copies when it last looked"
    planned = plural(found["planned"], "action")
    work = f"{planned} planned on all nodes together, {found['done']} done here in the last round"
    counts = {**found, "short": found["short"] - found["lost"]}
    stuck = [f"{counts[name]} {words}" for name, words in _STUCK.items() if counts[name]]
    return "; ".join([work, *stuck])


_STUCK = {"short": "short for want of nodes or of copies", "lost": "lost"}
