"""`replicated-ckpt verify`: reads every file of every checkpoint on every node that it reaches, and changes nothing."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from shlex import quote
from typing import Any

from replicated_ckpt.agent.repair.audit import Audit
from replicated_ckpt.cli.checkpoints.ls import list_bucket, name_bucket, name_bucket_alone
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import (
    advise,
    choose_id,
    describe_absent,
    describe_newer,
    find_id,
    list_checkpoints,
)
from replicated_ckpt.cli.look.conflicting_runs import describe_conflicting_runs
from replicated_ckpt.cli.look.given_nodes import add_nodes_argument, open_book
from replicated_ckpt.cli.look.given_root import add_root_argument, add_start_argument, name_root, open_store_of
from replicated_ckpt.cli.look.nodes import NO_NODES, NodesSeen, look_at_nodes
from replicated_ckpt.cli.look.progress import format_duration, print_if_slow, read_all, show_progress
from replicated_ckpt.cli.printing import Colour, add_output_argument, paint
from replicated_ckpt.core.inventory import saves_found
from replicated_ckpt.core.reading.newest import is_newest
from replicated_ckpt.core.upkeep.repair_plan import Finding, ShortShard
from replicated_ckpt.errors import CheckpointNotFound, StoreError
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.peers.unmanaged_audit import UnmanagedAudit, UnmanagedAuditor
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.inspection import BucketInspector
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import describe_bytes, plural

HELP = "Read and check every byte on this node and its peers. Changes nothing."


_LIST = "`replicated-ckpt ls --object-store URL` lists the checkpoints there."
_WORST_FIRST = (ExitCode.SHARD_LOST, ExitCode.FAILED, ExitCode.UNREACHABLE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root_argument(parser, required=False)
    parser.add_argument("id", nargs="?", metavar="ID", help="only this checkpoint, or latest (default: all)")
    parser.add_argument(
        "--object-store",
        metavar="URL",
        help="also read what is in this bucket, such as s3://bucket/prefix; without --root, only that",
    )
    add_nodes_argument(parser)
    add_start_argument(parser)
    parser.add_argument(
        "--progress", action="store_true", help="print progress to standard error even if it is not a terminal"
    )
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if every byte is as it was saved and every shard has its copies. See ExitCode for the others.

    Raises:
        CheckpointNotFound, ConfigInvalid, AgentUnavailable: as `open_store_of`. StoreError: the node's store or the bucket
            cannot be read. The findings on the nodes are printed before an error of the bucket.
    """
    if arguments.root is None and not arguments.nodes:
        return _verify_bucket_alone(arguments)
    store = open_store_of(arguments)
    peers = open_book(store, arguments.nodes)
    arguments.id = arguments.id and find_id(store, arguments.id, peers=peers)
    target = None if arguments.object_store is None else name_bucket(arguments.object_store, store)
    began_at = time.monotonic()
    audit = read_all(store, arguments.id, peers, shows_progress=arguments.progress)
    seconds = time.monotonic() - began_at
    audits = UnmanagedAuditor(store, audit.silent_nodes, peers).audit(arguments.id, audit.checkpoint_ids)
    newer = [] if arguments.id else see_audit(store, audit, peers).newer
    if (audit.checkpoint_ids or audits or not arguments.id) and not arguments.json:
        _print(store, audit, see_audit(store, audit, peers), seconds, has_others=bool(audits or newer))
        _print_unmanaged(audits)
        for line in map(describe_newer, newer):
            print(f"not checked: {line}")
        # Flushed now: the bucket may take hours, and a pipe would hold the nodes' result back until then.
        sys.stdout.flush()
    there = _InBucket() if target is None else _read(target, arguments.id, shows_progress=arguments.progress)
    if arguments.id and not (audit.checkpoint_ids or audits or there.is_anything):
        raise describe_absent(store, look_at_nodes(store, peers), arguments.id)
    if arguments.json:
        others = {"unmanaged": [found.to_json() for found in audits], "newer_format": newer}
        document = {**as_json(audit), "seconds": round(seconds, 3), **others, "object_store": there.to_json()}
        print(json.dumps(document, indent=2))
    else:
        _print_bucket(there, _list_newest(audit))
    # Raised last: what was read on the nodes is printed by now.
    if there.problem is not None:
        raise there.problem
    codes = (
        exit_code(audit),
        _unmanaged_code(audits),
        ExitCode.FAILED if there.findings or there.newer or newer else ExitCode.OK,
    )
    return next((code for code in _WORST_FIRST if code in codes), ExitCode.OK)


def _verify_bucket_alone(arguments: argparse.Namespace) -> int:
    target = name_bucket_alone(arguments)
    if arguments.id:
        asked = arguments.id
        arguments.id = choose_id(asked, list_checkpoints(NO_NODES, list_bucket(target))) if is_newest(asked) else asked
        if arguments.id is None:
            raise CheckpointNotFound(f"{target.url} has no checkpoint for {asked!r}.", _LIST)
    there = _read(target, arguments.id, shows_progress=arguments.progress)
    if there.problem is not None:
        raise there.problem
    if arguments.id and not there.is_anything:
        raise CheckpointNotFound(f"{target.url} has no checkpoint {arguments.id!r}.", _LIST)
    if arguments.json:
        print(json.dumps({"object_store": there.to_json()}, indent=2))
    else:
        _print_bucket(there, {})
    return ExitCode.FAILED if there.findings or there.newer else ExitCode.OK


@dataclass(frozen=True)
class _InBucket:
    """The findings in the bucket. `unchecked`: checkpoints of stock torch, without checksums.

    `newer`: checkpoints that only a newer version reads. `save_ids`: of all saves that are committed there. `problem`: the
    error, if the bucket could not be read.
    """

    url: str = ""
    checkpoint_ids: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    save_ids: tuple[str, ...] = ()
    bytes_read: int = 0
    findings: tuple[Finding, ...] = ()
    problem: StoreError | None = None

    @property
    def is_anything(self) -> bool:
        """Whether the requested checkpoint may be there."""
        return bool(self.checkpoint_ids or self.newer or self.problem)

    def to_json(self) -> dict[str, Any]:
        findings = [finding.to_json() for finding in self.findings]
        error = "" if self.problem is None else str(self.problem)
        return {**asdict(replace(self, findings=(), problem=None)), "findings": findings, "problem": error}


def _read(target: ObjectTarget, checkpoint_id: str | None, *, shows_progress: bool) -> _InBucket:
    try:
        # Retried: one failed request of thousands must not end a check that takes hours.
        with closing(RetryingClient(open_client(target))) as client:
            inspector = BucketInspector(Bucket(client))
            with print_if_slow(target.url):
                saves = inspector.list_saves(checkpoint_id)
            size = sum(sum(save.sizes.values()) for save in saves)
            look = lambda: {target.url: (inspector.bytes_read, size)}  # noqa: E731 - called by the progress alone
            with show_progress("verify", f"read in {target.url}", look, always=shows_progress):
                findings = tuple(finding for save in saves for finding in inspector.inspect_save(save))
    except StoreError as exc:
        return _InBucket(target.url, problem=exc)
    return _InBucket(
        target.url,
        tuple(inspector.checkpoint_ids),
        tuple(inspector.unchecked),
        tuple(inspector.newer),
        tuple(save.save_id for save in saves),
        inspector.bytes_read,
        findings,
    )


def _list_newest(audit: Audit) -> Mapping[str, str]:
    """By checkpoint on the nodes, the save that a load takes from them, or "" without a valid manifest."""
    holdings = [holding for reading in audit.readings for holding in reading.held.holdings]
    newest: dict[str, str] = dict.fromkeys(audit.checkpoint_ids, "")
    return newest | {save.checkpoint_id: save.save_id for save in reversed(saves_found(holdings))}


def _print_bucket(there: _InBucket, on_nodes: Mapping[str, str]) -> None:
    """Prints the findings in the bucket. `on_nodes`: the newest save of each checkpoint on the nodes."""
    for finding in there.findings:
        print(finding)
    for checkpoint_id in there.unchecked:
        print(f"not checked: {checkpoint_id} in {there.url}: stock torch wrote it, without checksums")
    for checkpoint_id in there.newer:
        print(f"not checked: {describe_newer(f'{checkpoint_id} in {there.url}')}")
    if there.url and there.problem is None:
        absent = [one for one in on_nodes if one not in {*there.checkpoint_ids, *there.unchecked, *there.newer}]
        if absent:
            print(f"on the nodes, but not in {there.url}: {', '.join(absent)}")
        others = [one for one in there.checkpoint_ids if on_nodes.get(one) and on_nodes[one] not in there.save_ids]
        if others:
            print(f"{there.url} has another save than the nodes' newest one: {', '.join(others)}")
        found = paint("intact", Colour.GREEN) if there.checkpoint_ids else "no checkpoint to verify"
        verdict = paint("NOT intact", Colour.RED) if there.findings else found
        print(
            f"{plural(len(there.checkpoint_ids), 'checkpoint')} in {there.url}, {there.bytes_read} bytes read: {verdict}"
        )


def describe_short(short: ShortShard) -> str:
    return f"{'lost' if short.is_lost else 'in doubt' if short.is_in_doubt else 'too few copies'}: {short}"


def exit_code(audit: Audit) -> ExitCode:
    if audit.plan.lost:
        return ExitCode.SHARD_LOST
    if not audit.is_intact:
        return ExitCode.FAILED
    return ExitCode.UNREACHABLE if audit.unreachable or audit.not_asked else ExitCode.OK


def as_json(audit: Audit) -> dict[str, Any]:
    return {
        "checkpoints": list(audit.checkpoint_ids),
        "is_intact": audit.is_intact,
        "nodes": [{"node_id": found.node_id, "bytes_read": found.bytes_read} for found in audit.readings],
        "findings": [finding.to_json() for finding in audit.findings],
        "unreachable": list(audit.unreachable),
        "not_asked": list(audit.not_asked),
        "plan": audit.plan.to_json(),
    }


def _print(store: LocalStore, audit: Audit, seen: NodesSeen, seconds: float, *, has_others: bool) -> None:
    """Prints the audit of the nodes. `has_others`: checkpoints of stock torch or of newer versions are printed after it."""
    for finding in audit.findings:
        print(seen.label_all(finding))
    for short in audit.plan.short:
        print(describe_short(short))
    for action in audit.plan.actions:
        print(f"repair would do: {seen.label_all(action)}")
    if audit.plan.actions:
        repair = f"`replicated-ckpt repair --root {quote(str(name_root(store)))}`"
        print(f"next step: {repair} does this now. Agents that run also do it, within minutes")
    rows = list_checkpoints(seen)
    for row in rows:
        if (seen.unreached.keys() | set(audit.not_asked)) & set(row.not_reached):
            print(f"{row.checkpoint_id}: {row.describe_copies(seen)}")
    for line in [
        *describe_conflicting_runs(rows, seen, name_root(store)),
        *seen.describe_unreached(),
        *advise(rows, seen, name_root(store)),
    ]:
        print(line)
    size = sum(reading.bytes_read for reading in audit.readings)
    read = f"{describe_bytes(size)} read in {format_duration(seconds)} ({describe_bytes(size / max(seconds, 1e-9))}/s)"
    nodes = f"{len(audit.readings)} of {plural(len(audit.readings) + len(audit.silent), 'node')}"
    print(
        f"{plural(len(audit.checkpoint_ids), 'checkpoint')}, {nodes}, {read}: {_verdict(audit, has_others=has_others)}"
    )


def _print_unmanaged(audits: Sequence[UnmanagedAudit]) -> None:
    for audit in audits:
        for finding in audit.findings:
            print(finding)
        if audit.problem:
            print(f"stock: {audit.checkpoint_id}: {audit.problem}")
        elif audit.missing:
            print(f"stock: {audit.checkpoint_id}: no node that was reached has {', '.join(audit.missing)}")
        else:
            print(
                f"stock: {audit.checkpoint_id} of stock torch, unprotected: {audit.bytes_read} bytes read, "
                f"{audit.unchecked} items without a CRC32: {('sound' if audit.is_sound else 'NOT sound')}"
            )


def _unmanaged_code(audits: Sequence[UnmanagedAudit]) -> ExitCode:
    if any(audit.missing for audit in audits):
        return ExitCode.SHARD_LOST
    return ExitCode.OK if all(audit.is_sound for audit in audits) else ExitCode.FAILED


def _verdict(audit: Audit, *, has_others: bool) -> str:
    if not audit.is_intact:
        return paint("NOT intact", Colour.RED)
    if audit.silent:
        return f"all that was read is intact; {plural(len(audit.silent), 'node')} did not answer"
    if audit.not_asked:
        return f"all that was read is intact; {plural(len(audit.not_asked), 'other node')} of it not asked"
    if audit.checkpoint_ids:
        return paint("intact", Colour.GREEN)
    return "no checkpoint with a manifest that this version reads" if has_others else "no checkpoint to verify"


def see_audit(store: LocalStore, audit: Audit, peers: PeerBook | None = None) -> NodesSeen:
    held = {found.node_id: found.held for found in audit.readings}
    peers = PeerBook(store.root_agent_directory()) if peers is None else peers
    addresses = {peer.node_id: peer for peer in (*peers.read_all(), *audit.silent)}
    unreached = {address.node_id: error for address, error in audit.silent.items()}
    forgotten = peers.read_forgotten() - addresses.keys()
    return NodesSeen(store.read_node_id(), held, addresses, unreached, audit.manifests, forgotten)
