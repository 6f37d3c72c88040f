"""`replicated-ckpt drain`: has other nodes copy this node's files, so that it may be taken down."""

import argparse
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from replicated_ckpt.cli.checkpoints.repair import carry_out
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import describe_newer
from replicated_ckpt.cli.look.given_root import add_root_argument, open_store, start_agent
from replicated_ckpt.cli.look.nodes import NodesSeen, advise_on_silence, ask_own_status, look_at_nodes
from replicated_ckpt.cli.look.progress import read_all
from replicated_ckpt.cli.look.waiting_saves import list_staged_saves
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.core.upkeep.repair import plan_repair
from replicated_ckpt.core.upkeep.repair_plan import RepairPlan
from replicated_ckpt.core.upkeep.retention import find_removed, find_retired
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.memory_tier import find_memory_tier
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.wording import describe_bytes, list_some, plural

HELP = "Copy this node's files to other nodes, and print whether the node may be taken down."
_ALONE = (
    "next step: run a job with ranks on another node as well, whose agent then receives the copies; or save the "
    "checkpoints that you need with `replicated-ckpt export`"
)
_SHOWN_MAX = 5
ROUNDS_MAX = 4
"""A node gets a checkpoint's manifest in one round and its shards in the next. A third round has no work."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root_argument(parser, "this node's store; this is the node to take down")
    parser.add_argument("--dry-run", action="store_true", help="print what would be copied; change nothing")
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if every checkpoint has its copies on the nodes that stay, else FAILED. The output has the reason.

    First all nodes read every byte, as for `verify`. A bad copy does not count, and is made anew.
    """
    store, unread = open_store(arguments.root), frozenset[str]()
    if not arguments.dry_run:
        # Announced first: of two drains at the same time, the later one does not count copies on the other node.
        _announce_drained(store, is_drained=True)
        unread = read_all(store).silent_nodes  # all other agents have now recorded their bad copies
    done = 0
    failed: dict[str, str] = {}
    for _ in range(ROUNDS_MAX):
        if not arguments.dry_run:
            _announce_drained(store, is_drained=True)  # again: an agent that was restarted meanwhile has lost the mark
        seen = look_at_nodes(store)
        plan = _plan(seen, unread)
        # A failed action would fail again: the user first needs to see its error.
        if arguments.dry_run or not plan.actions or failed:
            break
        done += len(plan.actions)
        failed = carry_out(plan, seen.addresses, seen.label)
    stays, others = _list_what_stays(store, seen), _list_others(store)
    drained = _Drained(seen, plan, done, failed, stays, others, unread & seen.holdings_by_node.keys())
    # The node stays: drains of other nodes may count on its copies again.
    if not (arguments.dry_run or drained.is_empty):
        _announce_drained(store, is_drained=False)
    if arguments.json:
        print(json.dumps(drained.to_json(), indent=2))
    else:
        print("\n".join(drained.describe(store)))
    return ExitCode.OK if drained.is_empty else ExitCode.FAILED


def _announce_drained(store: LocalStore, *, is_drained: bool) -> None:
    """Has this node's agent announce that the node is drained, until it exits. Raises AgentUnavailable, StoreError."""
    with AgentClient(start_agent(store)) as client:
        client.call("POST", "/v1/drained", {"is_drained": is_drained})


@dataclass(frozen=True)
class _Drained:
    """The progress of a drain. `plan`: the missing copies. `stays`: data here that copies on other nodes cannot replace.

    `not_copied`: files in checkpoints' directories that are not part of a checkpoint, and that no node copies. `unread`:
    nodes that answer now, but did not read their files when they were asked. Their copies do not count.
    """

    seen: NodesSeen
    plan: RepairPlan
    done: int
    failed: dict[str, str]
    stays: list[str]
    not_copied: list[str]
    unread: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        return not (self.plan.actions or self.plan.short or self.failed or self.stays)

    def to_json(self) -> dict[str, Any]:
        return {
            "may_be_taken_down": self.is_empty,
            "plan": self.plan.to_json(),
            "done": self.done,
            "failed": self.failed,
            "stays": self.stays,
            "not_copied": self.not_copied,
            "not_reached": sorted(self.seen.unreached),
            "not_read": sorted(self.unread),
        }

    @property
    def _drained_before(self) -> list[str]:
        """Other nodes that answer and are about to be taken down, too."""
        return [
            node
            for node, held in self.seen.holdings_by_node.items()
            if held.node_report.is_drained and node != self.seen.own_node
        ]

    @property
    def _has_others(self) -> bool:
        return self.seen.nodes_known > 1 + len(self._drained_before)

    def _name_shortage(self) -> str:
        if self.seen.unreached:
            return "too few nodes answered to hold the copies"
        return "not enough room for the copies on other nodes" if self._has_others else "no other node can hold a copy"

    def _name_not_copied(self, store: LocalStore) -> list[str]:
        """Lines about data that is lost with the node, because no node copies it."""
        lines = []
        if self.not_copied:
            named = list_some(self.not_copied, _SHOWN_MAX, "file")
            lines.append(f"not copied, as it is not part of a checkpoint: {named}. Copy what you need by hand")
        tier = find_memory_tier(store)
        if tier is not None and any(LocalStore(tier).catalog.committed()):
            drain_it = f"`replicated-ckpt drain --root {quote(str(tier))}`"
            lines.append(f"this node's memory tier is a separate store: {drain_it}")
        return lines

    def describe(self, store: LocalStore) -> list[str]:
        size = describe_bytes(sum(copy.size_bytes for copy in self.plan.copy))
        lines = [f"to do: {action}" for action in self.plan.actions]
        lines += [f"to do in all: {size} to copy"] if self.plan.copy else []
        lines += [f"{self._name_shortage()}: {short}" for short in self.plan.short]
        lines += [f"failed: {what}: {why}" for what, why in self.failed.items()]
        lines += [f"not drained: {what}" for what in self.stays]
        lines += self._name_not_copied(store)
        gone = self._drained_before
        lines += [f"not counted, as already drained: {self.seen.list_names(gone)}"] if gone else []
        if self.unread:
            names = self.seen.list_names(self.unread)
            lines.append(f"not counted, as it stopped answering: {names}; run the same command again")
        other_count = len(self.seen.holdings_by_node) - 1 - len(self.unread.union(gone))
        others = plural(other_count, "other node")
        label = self.seen.label(self.seen.own_node)
        if not self.is_empty:
            there = f"too few copies on the {others} that answered" if other_count else "no copy elsewhere"
            lines.append(f"{label} must stay up: the data listed above has {there}")
            lines += [] if self._has_others else [_ALONE]
            return [
                *lines,
                *self.seen.describe_unreached(),
                *advise_on_silence(self.seen, self.seen.unreached, store.root),
            ]
        lines.append(f"{label} may be taken down: every checkpoint has its copies on the {others} that answered")
        wanted = max((manifest.copies for manifest in self.seen.manifests.values()), default=1)
        if other_count < wanted:
            lines.append(f"but {wanted} copies are wanted, and {others} can hold no more than one each")
        lines.append(
            "next step: first end the ranks here, which would save here again, then stop the node. Other drains do "
            "not count its copies until its agent ends or a rank saves here. If this node never comes back: "
            f"`replicated-ckpt forget {self.seen.own_node} --root {quote(str(store.root))}` on the others"
        )
        return lines


def _plan(seen: NodesSeen, unread: Collection[str] = ()) -> RepairPlan:
    """The plan that replaces this node's copies on the nodes that answer and stay. Silent nodes do not count."""
    up = [held.view_of(node) for node, held in seen.holdings_by_node.items() if node not in unread]
    views = [replace(view, is_leaving=view.node_id == seen.own_node or view.node_report.is_drained) for view in up]
    return plan_repair(seen.manifests, views, going=find_retired(seen.manifests, views) | find_removed(views))


def _list_what_stays(store: LocalStore, seen: NodesSeen) -> list[str]:
    """Data here that copies on other nodes cannot replace."""
    stays = [str(save) for save in list_staged_saves(store)]
    stays += [f"{one.checkpoint_id} is being saved here" for one in store.list_staged() if store.is_locked(one.save_id)]
    managed = {holding.checkpoint_id for holding in seen.holdings}
    stays += [
        (f"{checkpoint_id} has no manifest and no copies; if stock torch wrote it, load it and save it under a new id")
        for checkpoint_id in store.catalog.without_manifest()
        if checkpoint_id not in managed
    ]
    stays += map(describe_newer, store.catalog.of_newer_format())
    stays += _list_removed_elsewhere(seen)
    own = ask_own_status(store)
    if own is not None:
        pending = own["object_store"]["pending"].values()
        stays += [f"{upload['checkpoint_id']} is being uploaded to {upload['url']}" for upload in pending]
    # Without an agent it is unknown which uploads are complete: the bucket may lack data that only this node has.
    elif any(manifest.upload for _, manifest in store.catalog.committed()):
        stays.append("no agent runs here, so open uploads are unknown; without --dry-run the command starts one")
    return stays


def _list_others(store: LocalStore) -> list[str]:
    """The user's files (a tokenizer, a `config.json`) in the directories of checkpoints here."""
    with translate_errors(str(store.root), "list", ""):
        every = store.catalog.look_at_all()
        own = {looked.checkpoint_id for looked in every if looked.holds_checkpoint}
        found = (f"{looked.checkpoint_id}/{name}" for looked in every if looked.has_manifest for name in looked.others)
        return sorted(path for path in found if not any(f"{one}/".startswith(f"{path}/") for one in own))


def _list_removed_elsewhere(seen: NodesSeen) -> list[str]:
    """Checkpoints here that no node copies, because the user of another node has removed them there."""
    own, found = seen.holdings_by_node[seen.own_node], []
    for holding in own.holdings:
        nodes = [node for node in seen.removed_on(holding.checkpoint_id, holding.save_id) if node != seen.own_node]
        if nodes and holding.save_id not in own.node_report.removed:
            what = f"{holding.checkpoint_id} was removed on {seen.list_names(nodes)}, so it gets no copies"
            found.append(f"{what}; `rm` it here, too, or copy it by hand first")
    return found
