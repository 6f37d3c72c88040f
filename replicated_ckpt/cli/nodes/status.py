"""`replicated-ckpt status`: nodes, agents, protection, uploads, room and last errors; its exit code serves probes."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.agent.launch import running_agent
from replicated_ckpt.agent.state.endpoint import has_clients, read_endpoint
from replicated_ckpt.agent.state.log_file import LOG_NAME
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import CheckpointSeen, advise_on_missing, describe_totals, list_checkpoints
from replicated_ckpt.cli.look.conflicting_runs import describe_conflicting_runs
from replicated_ckpt.cli.look.given_nodes import add_nodes_argument, open_book
from replicated_ckpt.cli.look.given_root import (
    add_root_argument,
    add_start_argument,
    describe_memory_tier,
    name_root,
    open_store_of,
)
from replicated_ckpt.cli.look.nodes import NodesSeen, ask_own_status, look_at_nodes
from replicated_ckpt.cli.look.progress import format_moment, format_table, parse_seconds
from replicated_ckpt.cli.look.waiting_saves import WaitingSave, advise_on_in_doubt, list_waiting
from replicated_ckpt.cli.nodes.health import Health, describe_room, describe_work, judge_health
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.peers.watch import describe_silence
from replicated_ckpt.stores.local.store import LocalStore

HELP = (
    "Show the state of nodes, copies, uploads and disks. Exit code: 0 good or idle, 1 degraded, 4 files are "
    "lost, 5 down."
)
_WATCH_EVERY_S = 2.0
_LOG_BYTES = 64 << 10
_ERRORS_MAX = 3
_LOG_COLUMNS = 200
_LOG_MOMENT = "%Y-%m-%d %H:%M:%S"
"""The time at the beginning of a line in the agent's log."""
_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root_argument(parser, required=False)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=parse_seconds,
        const=_WATCH_EVERY_S,
        metavar="SECONDS",
        help=f"repeat until stopped, by default every {_WATCH_EVERY_S:.0f} s, and mark changes",
    )
    add_nodes_argument(parser)
    add_start_argument(parser)
    parser.add_argument(
        "--own-agent", action="store_true", help="only check this node's agent: exit code 0 if it answers, else 5"
    )
    add_output_argument(parser, "with --watch, one line for each repetition")


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK (good, idle), FAILED (degraded), SHARD_LOST (files that no node can hold), UNREACHABLE (down)."""
    store = open_store_of(arguments)
    peers = open_book(store, arguments.nodes)
    before: Sequence[str] | None = None
    while True:
        state: _State | _OwnAgent = _ask_own_agent(store) if arguments.own_agent else _look(store, peers)
        if arguments.json:
            print(json.dumps(state.to_json(store), indent=None if arguments.watch else 2), flush=True)
        elif arguments.watch is None:
            print(state.text(store), flush=True)
        else:
            lines = state.text(store).splitlines()
            _show_again(lines, before, arguments.watch)
            before = lines
        if arguments.watch is None:
            return state.code
        time.sleep(arguments.watch)


def _show_again(lines: Sequence[str], before: Sequence[str] | None, every_s: float) -> None:
    """Prints the time, then the lines, with a mark at each line that `before` does not have."""
    clear = _CLEAR if sys.stdout.isatty() else ""
    print(f"{clear}{format_moment(time.time())}, every {every_s:g} s until Ctrl-C; * marks changed lines")
    changed = set(lines).difference(lines if before is None else before)
    print("\n".join(f"{'*' if line in changed else ' '} {line}" for line in lines), flush=True)


@dataclass(frozen=True)
class _OwnAgent:
    """Whether this node's agent answers. `pid` None: it does not, for the reason `why_down`."""

    pid: int | None
    why_down: str = "this node's agent does not run"

    @property
    def code(self) -> ExitCode:
        return ExitCode.UNREACHABLE if self.pid is None else ExitCode.OK

    def to_json(self, _: LocalStore) -> dict[str, Any]:
        state = "down" if self.pid is None else "good"
        reasons = [self.why_down] if self.pid is None else []
        found = {"unix_s": round(time.time(), 3), "state": state, "exit_code": int(self.code)}
        return {**found, "reasons": reasons, "pid": self.pid}

    def text(self, _: LocalStore) -> str:
        return f"down: {self.why_down}" if self.pid is None else f"this node's agent answers (pid {self.pid})"


def _ask_own_agent(store: LocalStore) -> _OwnAgent:
    """The check for a probe. It asks no other node, and the agent answers from memory."""
    try:
        endpoint = running_agent(store)
    except ReplicatedCkptError as exc:
        return _OwnAgent(None, str(exc))
    return _OwnAgent(None if endpoint is None else endpoint.pid)


@dataclass(frozen=True)
class _State:
    """One look. `agent`: the status from this node's agent, or None. `is_silent`: the agent runs but does not answer."""

    seen: NodesSeen
    rows: Sequence[CheckpointSeen]
    agent: Mapping[str, Any] | None
    is_silent: bool
    errors: Sequence[str]
    health: Health
    in_doubt: Sequence[WaitingSave]
    memory_tier: Sequence[str]

    @property
    def code(self) -> ExitCode:
        return self.health.code

    def to_json(self, store: LocalStore) -> dict[str, Any]:
        nodes = [
            {"node_id": node, "is_reached": True, "room": None if held.room is None else held.room.to_json()}
            for node, held in sorted(self.seen.holdings_by_node.items())
        ]
        nodes += [
            {"node_id": node, "is_reached": False, "error": describe_silence(error)}
            for node, error in sorted(self.seen.unreached.items())
        ]
        return {
            "unix_s": round(time.time(), 3),
            "state": self.health.word,
            "exit_code": int(self.health.code),
            "reasons": self.health.reasons,
            "notes": list(self.health.notes),
            "node_id": self.seen.own_node,
            "nodes": nodes,
            "checkpoints": [row.to_json() for row in self.rows],
            "memory_tier": list(self.memory_tier),
            "agent": self.agent,
            "last_errors": list(self.errors),
            "conflicting_runs": describe_conflicting_runs(self.rows, self.seen, name_root(store)),
        }

    def text(self, store: LocalStore) -> str:
        """The output: the verdict with its next steps, then nodes, checkpoints and uploads."""
        lines = [
            *self.health.lines,
            *self._next_steps(store),
            *describe_conflicting_runs(self.rows, self.seen, name_root(store)),
        ]
        lines += [format_table(("NODE", "AGENT", "CHECKPOINTS", "ROOM"), list(map(self._cells, self._nodes())))]
        lines += [f"copies: {describe_totals(self.rows, self.seen, self.health.bad)}", *self.memory_tier]
        if self.agent is not None:
            lines += describe_work(self.agent, self.seen, is_good=not self.health.bad)
        if self.health.found:
            columns = shutil.get_terminal_size((_LOG_COLUMNS, 0)).columns
            lines += [f"in the agent's log: {line}"[:columns] for line in self.errors]
        return "\n".join(lines)

    def _next_steps(self, store: LocalStore) -> list[str]:
        if not self.health.found:
            return []
        is_down = self.seen.has_own and self.agent is None and not (self.is_silent or self.health.is_idle)
        start = ["next step: --start-agents starts this node's agent, as does a save or a load"] if is_down else []
        steps = [step for one in self.in_doubt for step in advise_on_in_doubt(one, self.seen, name_root(store))]
        rows = self.health.bad if self.health.is_idle else self.rows
        return [*start, *steps, *advise_on_missing(rows, self.seen, name_root(store))]

    def _nodes(self) -> list[str]:
        own = self.seen.own_node
        return [
            *([own] if self.seen.has_own else []),
            *sorted((self.seen.holdings_by_node.keys() | self.seen.unreached.keys()) - {own}),
        ]

    def _cells(self, node: str) -> tuple[str, str, str, str]:
        if node in self.seen.unreached:
            return self.seen.label(node), f"not reached: {describe_silence(self.seen.unreached[node])}", "-", "-"
        held, agent = self.seen.holdings_by_node[node], "up"
        if node == self.seen.own_node and self.agent is None:
            agent = "no answer" if self.is_silent else "none"
        elif node == self.seen.own_node and self.agent is not None:
            since = time.localtime(time.time() - self.agent["uptime_s"])
            agent = f"up since {time.strftime('%Y-%m-%d %H:%M', since)}, pid {self.agent['pid']}"
        return self.seen.label(node), agent, str(len(held.holdings)), describe_room(held.room)


def _look(store: LocalStore, peers: PeerBook) -> _State:
    agent, why_down, is_silent = None, "", False
    try:
        agent = ask_own_status(store)
    except ReplicatedCkptError as exc:
        # The agent is stopped or hangs, so another one cannot be started.
        why_down, is_silent = str(exc), True
    if agent is None and not is_silent:
        why_down = _describe_end(store)
    seen = look_at_nodes(store, peers, asks_own=not is_silent)
    rows = list_checkpoints(seen)
    in_doubt = list_waiting(store, None if agent is None else agent["in_doubt"])
    health = judge_health(seen, rows, agent, why_down, in_doubt, name_root(store))
    errors = _read_last_errors(store, 0.0 if agent is None else time.time() - agent["uptime_s"])
    return _State(seen, rows, agent, is_silent, errors, health, in_doubt, describe_memory_tier(store))


def _describe_end(store: LocalStore) -> str:
    """Why it is a problem that no agent runs here. "": the agent has exited normally, and no rank uses the store."""
    directory = store.root_agent_directory()
    try:
        # The next save of these ranks starts an agent, or fails.
        if has_clients(directory):
            return "none runs, and ranks use this store"
        # An agent that exits normally removes its endpoint file.
        was_killed = read_endpoint(directory) is not None
    except ReplicatedCkptError as exc:
        return f"its state cannot be read: {exc.message}"
    return f"none runs, and the last one was killed; its log is {directory / LOG_NAME}" if was_killed else ""


def _read_last_errors(store: LocalStore, since_unix_s: float) -> list[str]:
    """The last warnings and errors since that time in the log of this node's agent, if a rank or command started it."""
    path = store.root_agent_directory() / LOG_NAME
    try:
        with path.open("rb") as file:
            # A probe that runs every few seconds must not read 8 MiB each time.
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    since = time.strftime(_LOG_MOMENT, time.localtime(since_unix_s))
    return [line for line in lines if (" WARNING " in line or " ERROR " in line) and line >= since][-_ERRORS_MAX:]
