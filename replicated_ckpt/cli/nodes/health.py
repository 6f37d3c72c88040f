"""The verdict of `status` on nodes, checkpoints and this node's agent, with its reasons."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import (
    LOST,
    NOT_SEEN,
    SHORT,
    CheckpointSeen,
    describe_damaged_manifests,
    describe_newer,
    find_needed,
    without_superseded,
)
from replicated_ckpt.cli.look.nodes import NodesSeen, describe_spare
from replicated_ckpt.cli.look.progress import format_duration
from replicated_ckpt.cli.look.waiting_saves import WaitingSave
from replicated_ckpt.cli.printing import Colour, paint
from replicated_ckpt.core.divergence import describe_divergences
from replicated_ckpt.node.peers.watch import runs_no_agent
from replicated_ckpt.stores.files.room import Room
from replicated_ckpt.wording import describe_bytes, list_some, plural

_ROOM_BYTES_MIN = 64 << 20
"""Free space that a node should have in addition to the size of its largest save. With less, its next save may fail."""
_NAMED_MAX = 4


@dataclass(frozen=True)
class Health:
    """The findings, with their exit codes.

    `bad`: the checkpoints that lack files or copies. `notes`: optional steps for the reader. `is_idle`: no agent runs, and
    none is needed.
    """

    found: tuple[tuple[ExitCode, str], ...]
    """The worst first."""
    bad: tuple[CheckpointSeen, ...] = ()
    notes: tuple[str, ...] = ()
    is_idle: bool = False

    @property
    def code(self) -> ExitCode:
        """0 (good, idle), 1 (degraded), 4 (lost) or 5 (down)."""
        return self.found[0][0] if self.found else ExitCode.OK

    @property
    def word(self) -> str:
        return "idle" if self.is_idle and not self.found else _WORDS[self.code]

    @property
    def reasons(self) -> list[str]:
        return [why for _, why in self.found]

    @property
    def lines(self) -> list[str]:
        """A line for each finding, with its word, the worst first, or one line with the verdict. Then the notes."""
        return [
            *(
                [f"{_paint(code)}: {why}" for code, why in self.found]
                or [self.word if self.is_idle else _paint(self.code)]
            ),
            *(f"note: {note}" for note in self.notes),
        ]


_WORDS = {
    ExitCode.OK: "good",
    ExitCode.FAILED: "degraded",
    ExitCode.SHARD_LOST: "files are lost",
    ExitCode.UNREACHABLE: "down",
}


_COLOURS = {ExitCode.OK: Colour.GREEN, ExitCode.FAILED: Colour.YELLOW}


def _paint(code: ExitCode) -> str:
    return paint(_WORDS[code], _COLOURS.get(code, Colour.RED))


def judge_health(
    seen: NodesSeen,
    rows: Sequence[CheckpointSeen],
    agent: Mapping[str, Any] | None,
    why_down: str,
    in_doubt: Sequence[WaitingSave],
    root: Path,
) -> Health:
    """The verdict. `agent`: the status of this node's agent, if it answers.

    If `agent` is None and `why_down` is "", the agent has exited because no job runs.
    """
    is_idle = seen.has_own and agent is None and not why_down
    # Agents that ranks started exit after them. A refused connection is not a fault then.
    idle = frozenset(node for node, error in seen.unreached.items() if is_idle and runs_no_agent(error))
    short = [row for row in without_superseded(rows) if not row.is_good]
    bad = [row for row in short if not _waits_for_idle(row, idle)]
    needed = find_needed(bad, seen) | {node for one in in_doubt for node in one.nodes if node in seen.unreached}
    found = [(ExitCode.SHARD_LOST, why) for why in _describe(bad, seen, is_lost=True)]
    if why_down:
        found.append((ExitCode.UNREACHABLE, f"this node's agent does not answer: {why_down}"))
    degraded = [
        *_unwritable(seen),
        *_describe(bad, seen, is_lost=False),
        *map(describe_newer, seen.newer),
        *seen.describe_unreached(needed),
        *_crowded(seen, root),
        *(f"in doubt: {one.describe(seen)}" for one in in_doubt),
        *(() if agent is None else _failing(agent)),
    ]
    notes = [*(() if agent is None else _advise_on_refused(agent, root))]
    notes += [_describe_idle(seen, idle, root)] if is_idle else []
    spare = seen.unreached.keys() - needed - idle
    doubtful = spare & {node for row in short if _waits_for_idle(row, idle) for node in row.not_reached}
    notes += [
        f"{line}. Whether other nodes have its copies was not checked" for line in seen.describe_unreached(doubtful)
    ]
    notes += describe_spare(seen, root, spare - doubtful)
    notes += describe_damaged_manifests(rows, seen)
    notes += _describe_diverged(rows, seen)
    notes += _describe_rejected(rows, root)
    found += [(ExitCode.FAILED, why) for why in degraded]
    return Health(tuple(found), tuple(bad), tuple(notes), is_idle)


def _waits_for_idle(row: CheckpointSeen, idle: Collection[str]) -> bool:
    """Whether nodes whose agents have also exited may have its missing copies.

    A node that is down does not change this: the idle ones may have received its copies since the save.
    """
    return bool(idle) and row.state in (SHORT, NOT_SEEN) and bool(row.not_reached)


def _describe(bad: Sequence[CheckpointSeen], seen: NodesSeen, *, is_lost: bool) -> Iterator[str]:
    """One line for all checkpoints with the same problem."""
    by_words: dict[str, list[str]] = {}
    for row in bad:
        if (row.state == LOST) == is_lost:
            by_words.setdefault(row.describe_copies(seen), []).append(row.checkpoint_id)
    for words, names in by_words.items():
        yield f"{list_some(names, _NAMED_MAX)}: {words}"


def _describe_idle(seen: NodesSeen, idle: Collection[str], root: Path) -> str:
    others = f", nor on {seen.list_names(idle)}: copies there were not checked" if idle else ""
    rsh = " --rsh ssh" if idle else ""
    start = f"`replicated-ckpt status --start-agents{rsh} --root {quote(str(root))}`"
    by_hand = ", or the same without --rsh on each node" if idle else ""
    return (
        f"no job uses this store, and no agent runs here{others}. The next save or load starts agents, as does "
        f"{start}{by_hand}"
    )


def _unwritable(seen: NodesSeen) -> Iterator[str]:
    for node, held in sorted(seen.holdings_by_node.items()):
        # A disk that cannot be written may be readable and have free bytes: nothing else would show that saves fail.
        if held.room is not None and held.room.write_error:
            what = f"{seen.label(node)}: its root cannot be written: {held.room.write_error}"
            yield f"{what}. Its ranks cannot save, and it takes no copies. Check `dmesg` and `df` there"


def _crowded(seen: NodesSeen, root: Path) -> Iterator[str]:
    for node, held in sorted(seen.holdings_by_node.items()):
        # Bytes are compared, not shares: 5 % of 100 TB is room for many saves, and 20 % of 100 GB perhaps for none.
        largest = max((sum(one.sizes.values()) for one in held.holdings), default=0)
        if held.room is not None and held.room.size_bytes and held.room.free_bytes < largest + _ROOM_BYTES_MIN:
            what = f"{seen.label(node)}: {describe_room(held.room)}"
            what = f"{what}, and its largest save takes {describe_bytes(largest)}: the next one may not fit"
            prune = f"replicated-ckpt prune --root {quote(str(root))} --keep-last N --keep-in-bucket"
            yield f"{what}, as {describe_bytes(_ROOM_BYTES_MIN)} should stay free. `{prune}` there makes room"


def describe_room(room: Room | None) -> str:
    return "-" if room is None else f"{describe_bytes(room.free_bytes)} of {describe_bytes(room.size_bytes)} free"


def _describe_diverged(rows: Sequence[CheckpointSeen], seen: NodesSeen) -> Iterator[str]:
    """One line, for the newest checkpoint with diverged replicas. All later saves of such a run have them, too."""
    manifests = [seen.manifests[row.save_id] for row in rows if row.save_id in seen.manifests]
    diverged = sorted((one for one in manifests if one.divergences), key=lambda one: one.created_unix_s)
    if diverged:
        newest, others = diverged[-1], len(diverged) - 1
        more = f", and those of {plural(others, 'other checkpoint')}" if others else ""
        found = describe_divergences(newest.divergences, newest.host_by_rank)
        yield f"{newest.checkpoint_id}{more}: the save found replicas that differ: {found}"


def _describe_rejected(rows: Sequence[CheckpointSeen], root: Path) -> Iterator[str]:
    names = list(dict.fromkeys(row.checkpoint_id for row in rows if row.is_rejected))
    if names:
        undo = f"`replicated-ckpt reject {quote(names[0])} --undo --root {quote(str(root))}`"
        yield f'"latest" skips rejected checkpoints: {list_some(names, _NAMED_MAX)}. To end a rejection: {undo}'


def _failing(agent: Mapping[str, Any]) -> Iterator[str]:
    """The failures that this node's agent reports."""
    yield from agent.get("duplicate_nodes", ())
    protection = agent["protection"]
    for problem in protection["failed"]:
        yield f"re-protection: {problem}"
    failing_by_url: dict[str, list[Mapping[str, Any]]] = {}
    for upload in agent["object_store"]["pending"].values():
        if upload["error"]:
            failing_by_url.setdefault(upload["url"], []).append(upload)
    for url, failing in failing_by_url.items():
        names, last = list_some([upload["checkpoint_id"] for upload in failing], _NAMED_MAX), failing[-1]
        lasts = format_duration(max(upload["failing_s"] for upload in failing))
        yield f"upload of {names} to {url} has failed for {lasts}: {last['error']}"


def _advise_on_refused(agent: Mapping[str, Any], root: Path) -> Iterator[str]:
    """The ways out if a bucket refuses uploads, for example because its name is mistyped."""
    refused = {upload["url"]: upload for upload in agent["object_store"]["pending"].values() if upload["is_denied"]}
    for url, upload in refused.items():
        name, where = quote(upload["checkpoint_id"]), f"--root {quote(str(root))}"
        yield (
            f"{url} refuses uploads, and retention keeps these checkpoints until they are uploaded. Mend the bucket or the "
            f"credentials. Or use another bucket instead: `replicated-ckpt upload {name} {where} --to URL`. Or remove it: "
            f"`replicated-ckpt rm {name} {where} --keep-in-bucket --force`"
        )


def describe_work(agent: Mapping[str, Any], seen: NodesSeen, *, is_good: bool) -> list[str]:
    """The work of this node's agent: a line for re-protection and one for uploads, if there are any."""
    protection = agent["protection"]
    over = [f"node {node} lists more saves than this node reads at once" for node in protection.get("over_bound", ())]
    return [*over, *_describe_protection(protection, seen, is_good=is_good), *_describe_uploads(agent["object_store"])]


def _describe_uploads(uploads: Mapping[str, Any]) -> Iterator[str]:
    if uploads["pending"] or uploads["done"]:
        failing = sum(1 for upload in uploads["pending"].values() if upload["error"])
        said = f"uploads: {len(uploads['pending'])} under way, {uploads['done']} done since the agent started"
        yield said + (f", {failing} failing" if failing else "")


def _describe_protection(found: Mapping[str, Any], seen: NodesSeen, *, is_good: bool) -> Iterator[str]:
    """The state of re-protection. Nothing if `is_good`: every checkpoint has its copies now."""
    if is_good:
        return
    if not found["rounds"]:
        yield "re-protection: its first round has not run yet"
        return
    if found["is_complete"] or found["in_doubt"]:
        # If all answer, the round did not yet see what this look has seen, or nothing can be done.
        if seen.unreached:
            yield (
                "re-protection: waits for the nodes that do not answer, for the agent's --lost-after-s or "
                "--away-after-s, then makes the copies"
            )
        return
    planned = plural(found["planned"], "action")
    work = f"{planned} planned on all nodes together, {found['done']} done here in the last round"
    counts = {**found, "short": found["short"] - found["lost"]}
    stuck = [f"{counts[name]} {words}" for name, words in _STUCK.items() if counts[name]]
    yield "re-protection: " + "; ".join([work, *stuck])


_STUCK = {"short": "shards with too few copies, for lack of nodes or intact copies", "lost": "shards lost"}
