"""The removal that `rm` and `prune` share: from this node, from nodes with the same key file, then from the bucket."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from shlex import quote
from typing import Any, Self

from replicated_ckpt.agent.state.rights import read_owner_key
from replicated_ckpt.cli.checkpoints.ls import list_bucket, name_bucket
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import IN_BUCKET, CheckpointSeen, list_checkpoints, list_urls
from replicated_ckpt.cli.look.given_nodes import as_owner
from replicated_ckpt.cli.look.given_root import add_root_argument, repeat_command, start_agent
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes, on_each_host
from replicated_ckpt.cli.look.progress import print_if_slow, show_progress
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.config import Retention
from replicated_ckpt.core.manifest import metrics_of
from replicated_ckpt.core.upkeep.policy import NODES, pending, scope_of
from replicated_ckpt.core.upkeep.retention import NOT_UPLOADED, Candidate, Removable
from replicated_ckpt.environment import OWNER_KEY_ENV
from replicated_ckpt.errors import ReplicatedCkptError, StoreDenied
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.bucket_removal import remove_save
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.wording import describe_bytes, list_some, one_line


def add_removal_arguments(parser: argparse.ArgumentParser) -> None:
    add_root_argument(parser)
    parser.add_argument(
        "--object-store",
        metavar="URL",
        help="also remove from this bucket, with credentials from the environment; the bucket that the save names is "
        "included anyway",
    )
    parser.add_argument("--keep-in-bucket", action="store_true", help="remove nothing from any bucket")
    parser.add_argument(
        "--force", action="store_true", help="also remove the last good checkpoint of a run, or one that a load reads"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed; change nothing")
    add_output_argument(parser)


@dataclass
class Removed:
    """The outcome for the chosen saves, by checkpoint id.

    `removed`: removed from this node. `removed_on`: from other nodes, by node. `refused`: by node, why it removed nothing.
    `not_here`: this node had no copy. `removed_from`: by bucket. `kept`: why a save stays. `still_on`, `not_reached`: by
    node, the saves that it still has, or may have. `still_in_bucket`, `left_to_policy`: the bucket that still has the save.
    """

    removed: list[str] = field(default_factory=list)
    removed_on: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    not_here: list[str] = field(default_factory=list)
    removed_from: dict[str, list[str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    still_on: dict[str, list[str]] = field(default_factory=dict)
    not_reached: dict[str, list[str]] = field(default_factory=dict)
    still_in_bucket: dict[str, str] = field(default_factory=dict)
    left_to_policy: dict[str, str] = field(default_factory=dict)
    freed_bytes: int = 0

    @property
    def code(self) -> ExitCode:
        if self.kept or self.still_on:
            return ExitCode.FAILED
        return ExitCode.UNREACHABLE if self.not_reached else ExitCode.OK


class Remover:
    """Removes saves that `look` has found, through the nodes' agents. A dry run starts no agent.

    Another node's agent removes its part if it was started with this user's key. `leaves_to_policies`: a bucket that the
    job has a policy for is left alone, unless the user has named it.
    """

    def __init__(
        self,
        store: LocalStore,
        arguments: argparse.Namespace,
        agent: AgentAddress | None,
        target: ObjectTarget | None,
        seen: NodesSeen,
        rows: Sequence[CheckpointSeen],
    ) -> None:
        self._store, self._agent, self._target = store, agent, target
        self._freed_by_node = Counter[str]()
        self._size_bytes, self._done_bytes = 0, 0
        self._going_here: CheckpointSeen | None = None
        self._key, self._again = read_owner_key(), repeat_command(arguments, store)
        self._force, self._keeps_bucket = arguments.force, arguments.keep_in_bucket
        self.leaves_to_policies = False
        self.seen = seen
        self.rows = rows

    @classmethod
    def look(cls, store: LocalStore, arguments: argparse.Namespace) -> Self:
        """Starts this node's agent, and looks at the nodes and the bucket. Raises AgentUnavailable, StoreError."""
        target = None if arguments.object_store is None else name_bucket(arguments.object_store, store)
        # A dry run changes nothing, so it starts no agent.
        agent = None if arguments.dry_run else start_agent(store)
        seen = look_at_nodes(store)
        rows = list_checkpoints(seen, None if target is None else list_bucket(target))
        return cls(store, arguments, agent, target, seen, rows)

    def list_removable(self) -> list[Removable]:
        """The saves as the rules of retention judge them, without saves of unknown manifest and renamed directories."""
        waiting = pending(held.node_report for held in self.seen.holdings_by_node.values())
        return [
            Removable(self._candidate(row, waiting), row.lineage, is_lost=self._is_lost(row))
            for row in self.rows
            if (row.save_id in self.seen.manifests or row.state == IN_BUCKET)
            and self.seen.renamed_from(row.checkpoint_id, row.save_id) is None
        ]

    def _is_lost(self, row: CheckpointSeen) -> bool:
        """Whether a removal deletes no complete copy: the nodes have none, and the bucket has none or keeps it."""
        return row.is_lost and (self._keeps_bucket or row.bucket not in ("there", "unknown"))

    def _candidate(self, row: CheckpointSeen, waiting: frozenset[str]) -> Candidate:
        wanted = min(row.copies_wanted or 1, len(self.seen.holdings_by_node))
        manifest = self.seen.manifests.get(row.save_id)
        # A bucket with a mistyped name never gets it.
        is_waiting = (row.save_id in waiting or row.bucket == "unknown") and not (self._force and self._keeps_bucket)
        return Candidate(
            row.checkpoint_id,
            row.save_id,
            row.sequence,
            is_whole=not row.removed_on and (row.state == IN_BUCKET or bool(row.copies_seen)),
            is_protected=row.state == IN_BUCKET or (row.copies_seen or 0) >= max(1, wanted),
            held_back=NOT_UPLOADED if is_waiting else "",
            metrics={} if manifest is None else metrics_of(manifest.notes),
            is_rejected=row.is_rejected,
        )

    def find_others(self) -> set[str]:
        """The saves in the bucket of runs that no node has, perhaps another cluster's. Empty if no node has any run."""
        runs = {row.lineage for row in self.rows if row.state != IN_BUCKET} - {""}
        return {row.save_id for row in self.rows if runs and row.state == IN_BUCKET and row.lineage not in runs}

    def wanted_by(self, run: tuple[str, str], tier: str = NODES) -> Retention | None:
        """The policy for a run (its scope and lineage) in a tier that ranks sent to this node. None: they sent none."""
        reported = self.seen.holdings_by_node[self.seen.own_node].node_report.policies
        policies = reported or PolicyBook(self._store.root_agent_directory()).read_all()  # if no agent runs
        return next((one.retention for one in policies if one.tier == tier and (one.scope, one.lineage) == run), None)

    def carry_out(self, chosen: Sequence[CheckpointSeen]) -> Removed:
        """Removes the chosen saves, the oldest first. An error keeps only the versions of that checkpoint."""
        outcome = Removed()
        self._size_bytes = sum(self._measure(row, node) for row in chosen for node in self._list_removing(row))
        with show_progress("removing", "removed", self._look_how_far):
            for row in reversed(chosen):
                # If an older version stays, so do the newer ones: without them it would get the name back.
                if row.checkpoint_id in outcome.kept:
                    continue
                try:
                    self._remove(row, outcome)
                except StoreDenied as exc:
                    way_out = (
                        "" if self._keeps_bucket else " Or remove it from the nodes alone: --keep-in-bucket --force."
                    )
                    outcome.kept[row.checkpoint_id] = f"{exc}{way_out}"
                except ReplicatedCkptError as exc:
                    outcome.kept[row.checkpoint_id] = str(exc)
        if outcome.still_on:
            self._look_again(chosen, outcome)
        return outcome

    def _list_removing(self, row: CheckpointSeen) -> list[str]:
        """The nodes that may remove their part: this one, and with the user's key the others that answered."""
        own = self.seen.own_node
        return [node for node in row.nodes if node == own or (self._key and node in self.seen.holdings_by_node)]

    def _measure(self, row: CheckpointSeen, node: str) -> int:
        version = (row.checkpoint_id, row.save_id)
        held = [one for one in self.seen.holdings_by_node[node].holdings if (one.checkpoint_id, one.save_id) == version]
        return sum(sum(one.sizes.values()) for one in held)

    def _look_how_far(self) -> Mapping[str, tuple[int, int]]:
        """For the thread that shows progress. Of this node's part it counts the files that its agent has removed so far."""
        row, done_bytes = self._going_here, self._done_bytes
        if row is not None:
            with suppress(OSError, ReplicatedCkptError):
                left = sum(self._store.catalog.look(row.checkpoint_id).sizes.values())
                done_bytes += max(0, self._measure(row, self.seen.own_node) - left)
        return {self.seen.own_node: (done_bytes, self._size_bytes)}

    def _look_again(self, chosen: Sequence[CheckpointSeen], outcome: Removed) -> None:
        """Looks at the other nodes again. Saves that no node has any more are removed from the bucket.

        The command may run on several nodes at once. Each removes its own copy before this look: the last one finds none.
        """
        shared = {checkpoint_id for ids in outcome.still_on.values() for checkpoint_id in ids}
        saves = {(row.checkpoint_id, row.save_id) for row in chosen}
        for node, found in look_at_nodes(self._store).holdings_by_node.items():
            here = {one.checkpoint_id for one in found.holdings if (one.checkpoint_id, one.save_id) in saves}
            here.update(one.checkpoint_id for one in found.unclaimed)
            outcome.still_on[node] = [each for each in outcome.still_on.get(node, ()) if each in here]
        outcome.still_on = {node: ids for node, ids in outcome.still_on.items() if ids}
        gone = shared.difference(outcome.kept, *outcome.still_on.values(), *outcome.not_reached.values())
        for row in chosen:
            if row.checkpoint_id in gone:
                outcome.still_in_bucket.pop(row.checkpoint_id, None)
                try:
                    self._remove_from_bucket(row, is_last=True, outcome=outcome)
                except ReplicatedCkptError as exc:
                    outcome.kept[row.checkpoint_id] = f"in the bucket: {exc}"

    def _remove(self, row: CheckpointSeen, outcome: Removed) -> None:
        named = {"checkpoint_id": row.checkpoint_id, "save_id": row.save_id, "force": self._force}
        others = [node for node in row.nodes if node in self.seen.holdings_by_node and node != self.seen.own_node]
        # Asked before anything changes: a save that a load reads must stay everywhere.
        asked = {**named, "is_asked": True}
        why = self._ask_agent("/v1/remove", asked)["why"] or next(
            filter(None, self._ask_others(others, asked, outcome)), ""
        )
        if why:
            outcome.kept[row.checkpoint_id] = f"{why}; wait for it to end, or use --force"
            return
        others = [node for node in others if not self._remove_on(node, row, named, outcome)]
        # A silent node may have the last copy, so the bucket keeps its own until that is known.
        silent = self._silent_holders(row)
        for book, nodes in ((outcome.still_on, others), (outcome.not_reached, silent)):
            for node in nodes:
                book.setdefault(node, []).append(row.checkpoint_id)
        self._remove_from_bucket(row, is_last=not others and not silent, outcome=outcome)
        self._going_here = row
        answer = self._ask_agent("/v1/remove", named)
        self._going_here, self._done_bytes = None, self._done_bytes + self._measure(row, self.seen.own_node)
        for url, ids in outcome.removed_from.items():  # an upload in progress may have put it back meanwhile
            if row.checkpoint_id in ids:
                self._remove_from(url, row)
        if answer["why"]:
            outcome.kept[row.checkpoint_id] = one_line(answer["why"])
            return
        here = self.seen.holdings_by_node[self.seen.own_node]
        # Files without a manifest may belong to another save, so the agent removes none of them.
        if any(one.checkpoint_id == row.checkpoint_id for one in here.unclaimed):
            path = quote(str(self._store.root / row.checkpoint_id))
            outcome.kept[row.checkpoint_id] = (
                "its manifest on this node is damaged or missing, so its files belong to an unknown save; no node copies "
                f"it here again, and `rm -r {path}` removes them"
            )
            return
        held = [h for h in here.holdings if (h.checkpoint_id, h.save_id) == (row.checkpoint_id, row.save_id)]
        if not held and not answer["is_removed"]:
            # The agent may have finished an earlier, interrupted removal of this save by itself.
            outcome.not_here.append(row.checkpoint_id)
            return
        outcome.removed.append(row.checkpoint_id)
        self._count_freed(row, self.seen.own_node, outcome)

    def _ask_others(self, nodes: Sequence[str], document: Mapping[str, Any], outcome: Removed) -> Iterator[str]:
        """The reason of each of these nodes that keeps the save. A node that refuses this user is recorded in `outcome`."""
        for node in nodes:
            if (answer := self._ask_other(node, document, outcome)) is not None and answer["why"]:
                yield f"on {self.seen.label(node)}: {one_line(answer['why'])}"

    def _ask_other(self, node: str, document: Mapping[str, Any], outcome: Removed) -> Mapping[str, Any] | None:
        """The answer of another node's agent to `remove`. None: it refuses this user, or did not answer."""
        address = self.seen.addresses.get(node)
        if not self._key or address is None or node in outcome.refused:
            return None
        try:
            with AgentClient(as_owner(address, self._key)) as client:
                answer = client.call("POST", "/v1/remove", document)
            with parsing(f"{address.label} sent an invalid answer to remove"):
                return {"why": str(answer["why"]), "is_removed": bool(answer["is_removed"])}
        except StoreDenied:
            outcome.refused[node] = f"its agent was not started with this {OWNER_KEY_ENV}"
        except ReplicatedCkptError as exc:
            outcome.refused[node] = one_line(exc.message)
        return None

    def _remove_on(self, node: str, row: CheckpointSeen, named: Mapping[str, Any], outcome: Removed) -> bool:
        """Has another node's agent remove the save. Returns whether nothing of the save is left there."""
        answer, there = self._ask_other(node, named, outcome), self.seen.holdings_by_node[node]
        self._done_bytes += self._measure(row, node)
        if answer is None:
            return False
        # Files without a manifest may belong to another save, so the agent removes none of them.
        if any(one.checkpoint_id == row.checkpoint_id for one in there.unclaimed):
            answer = {**answer, "why": "its manifest is damaged, so the files belong to an unknown save"}
        if answer["why"]:
            outcome.kept[row.checkpoint_id] = f"on {self.seen.label(node)}: {one_line(answer['why'])}"
            return False
        outcome.removed_on.setdefault(node, []).append(row.checkpoint_id)
        self._count_freed(row, node, outcome)
        return True

    def _count_freed(self, row: CheckpointSeen, node: str, outcome: Removed) -> None:
        size_bytes = self._measure(row, node)
        outcome.freed_bytes += size_bytes
        self._freed_by_node[node] += size_bytes

    def _silent_holders(self, row: CheckpointSeen) -> list[str]:
        """Nodes that should hold files of the save, and did not answer or have no known address here.

        Without a manifest, as of a save in the bucket alone, these are all nodes that did not answer. Nodes that `forget`
        has removed do not count.
        """
        manifest = self.seen.manifests.get(row.save_id)
        meant = {*self.seen.unreached} if manifest is None else {node.node_id for node in manifest.nodes}
        return sorted(meant - self.seen.holdings_by_node.keys() - (self._forgotten - self.seen.unreached.keys()))

    @cached_property
    def _forgotten(self) -> frozenset[str]:
        return PeerBook(self._store.root_agent_directory()).read_forgotten()

    def _remove_from_bucket(self, row: CheckpointSeen, *, is_last: bool, outcome: Removed) -> None:
        """Removes the save from its buckets. After an interruption, this node still has the save for another try."""
        for url in list_urls(row, self.seen, self._target):
            if self._is_left_to_policy(url, row):
                outcome.left_to_policy[row.checkpoint_id] = url
                continue
            if self._keeps_bucket or not is_last:
                outcome.still_in_bucket[row.checkpoint_id] = url
                continue
            self._remove_from(url, row)
            outcome.removed_from.setdefault(url, []).append(row.checkpoint_id)

    def _is_left_to_policy(self, url: str, row: CheckpointSeen) -> bool:
        if not self.leaves_to_policies or (self._target is not None and url == self._target.url):
            return False
        return self.wanted_by((scope_of(row.checkpoint_id), row.lineage), url) is not None

    def _remove_from(self, url: str, row: CheckpointSeen) -> None:
        manifest = self.seen.manifests.get(row.save_id)  # from the first look: the agent's may be removed by now
        if self._target is not None and url == self._target.url:
            with print_if_slow(url), closing(open_client(self._target)) as there:  # credentials from the environment
                remove_save(Bucket(there), row.checkpoint_id, row.save_id, manifest)
            return
        raw = b"" if manifest is None else manifest.encode()
        told = raw.decode() if len(raw) <= _TOLD_BYTES_MAX else ""
        named = {"checkpoint_id": row.checkpoint_id, "save_id": row.save_id, "url": url, "manifest": told}
        with print_if_slow(url):
            self._ask_agent("/v1/object/remove", named)

    def _ask_agent(self, path: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
        with AgentClient(self._agent or start_agent(self._store)) as client:
            return client.call("POST", path, document)

    def describe_plan(self, chosen: Sequence[CheckpointSeen]) -> list[str]:
        """For a dry run: what would be removed where, and whether other nodes would remove their parts, too."""
        on = {row: self.seen.list_names(row.nodes) for row in chosen}
        plan = [f"would remove {row.checkpoint_id} (save {row.save_id}), on: {where}" for row, where in on.items()]
        return [*plan, *self.describe_reach(chosen)]

    def describe_reach(self, chosen: Sequence[CheckpointSeen]) -> list[str]:
        """For a dry run: whether other nodes would remove their parts, too, and what would go from which bucket."""
        lines: list[str] = []
        if len(self.seen.holdings_by_node) > 1:
            part = "each node whose agent was started with this key file removes its part"
            alone = f"the command removes from this node alone, as {OWNER_KEY_ENV} is not set"
            lines.append(part if self._key else alone)
        by_url: dict[str, list[str]] = {}
        for row in [] if self._keeps_bucket else chosen:
            for url in list_urls(row, self.seen, self._target):
                if not self._is_left_to_policy(url, row):
                    by_url.setdefault(url, []).append(row.checkpoint_id)
        for url, ids in sorted(by_url.items()):
            lines.append(
                f"also removed from {url} once no node has it, unless --keep-in-bucket is given: {_shorten(ids)}"
            )
        return lines

    def describe(self, outcome: Removed) -> list[str]:
        """Lines with the outcome: removals, the saves that stay and why, and the next step if copies are left."""
        by_node = {**({self.seen.own_node: outcome.removed} if outcome.removed else {}), **outcome.removed_on}
        where = {node: self.seen.label(node) for node in by_node} | {self.seen.own_node: "this node"}
        lines = [
            f"removed on {where[node]}: {_shorten(ids)} ({describe_bytes(self._freed_by_node[node])} freed)"
            for node, ids in by_node.items()
        ]
        lines += [f"removed from {url}: {_shorten(ids)}" for url, ids in sorted(outcome.removed_from.items())]
        lines += [f"not on this node, and not copied here again: {_shorten(outcome.not_here)}"] * any(outcome.not_here)
        lines += [f"kept: {checkpoint_id}: {why}" for checkpoint_id, why in outcome.kept.items()]
        for node, ids in sorted(outcome.still_on.items()):
            why = f": {outcome.refused[node]}" if node in outcome.refused else ""
            lines.append(f"still on {self.seen.label(node)}: {_shorten(ids)}{why}")
        for node, ids in sorted(outcome.not_reached.items()):
            forget = f"replicated-ckpt forget {node} --root {quote(str(self._store.root))}"
            gone = f"was not reached (if it never comes back: `{forget}` first)"
            why = gone if node in self.seen.unreached else "was not asked, as this node has no address of it"
            lines.append(f"{self.seen.label(node)} {why}, and may hold {_shorten(ids)}")
        if left := {*outcome.still_on, *outcome.not_reached} - {self.seen.own_node}:
            run = on_each_host(self.seen, left, self._again)
            lines.append(
                f"next step: run the same command on each of these nodes, for example with {run}. Without a common key "
                f"file ({OWNER_KEY_ENV}) a node removes only its own copies. No node copies a removed checkpoint again"
            )
        for url in sorted(set(outcome.still_in_bucket.values())):
            ids = [checkpoint_id for checkpoint_id, there in outcome.still_in_bucket.items() if there == url]
            why = "" if self._keeps_bucket else "; the last node that removes it also removes it there"
            if not self._keeps_bucket and any(set(ids) & set(silent) for silent in outcome.not_reached.values()):
                why += f", or once no node has it the same command with `--object-store {quote(url)}`"
            lines.append(f"not removed from {url}: {_shorten(ids)}{why}")
        for url in sorted(set(outcome.left_to_policy.values())):
            ids = [checkpoint_id for checkpoint_id, there in outcome.left_to_policy.items() if there == url]
            named = f"the same command with `--object-store {quote(url)}` removes it there, too"
            lines.append(f"left in {url}, where the job's policy applies: {_shorten(ids)}; {named}")
        return lines


_SHOWN_MAX = 5
_TOLD_BYTES_MAX = 1 << 20
"""A larger manifest is not sent to the agent: shards of an upload without a commit mark may then stay in the bucket."""


def _shorten(ids: Sequence[str]) -> str:
    return list_some(ids, _SHOWN_MAX, "checkpoint")
