"""`replicated-ckpt reject ID`: "latest" skips one checkpoint, on all nodes and in the bucket, until that is undone."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from replicated_ckpt.cli.checkpoints.ls import list_bucket, name_bucket
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import CheckpointSeen, describe_absent, list_checkpoints, list_urls
from replicated_ckpt.cli.look.given_root import add_root_argument, open_store, start_agent
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes
from replicated_ckpt.cli.look.progress import print_if_slow
from replicated_ckpt.cli.printing import add_output_argument, list_next_steps
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.wording import one_line

HELP = 'Make "latest" skip one checkpoint, on all nodes that answer and in the bucket, until --undo.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the checkpoint")
    add_root_argument(parser)
    parser.add_argument(
        "--object-store",
        metavar="URL",
        help="also mark it in this bucket, with credentials from the environment; the bucket that the save names is "
        "included anyway",
    )
    parser.add_argument("--undo", action="store_true", help='let "latest" take this checkpoint again')
    add_output_argument(parser)


@dataclass
class Marked:
    """The places where the mark was set, or ended. `not_reached`: the errors of nodes and buckets that did not answer."""

    checkpoint_id: str
    save_ids: tuple[str, ...]
    is_rejected: bool
    nodes: list[str]
    buckets: list[str]
    not_reached: dict[str, str]


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if all nodes of the address book and the buckets were reached; UNREACHABLE if not.

    Raises:
        CheckpointNotFound, ConfigInvalid, AgentUnavailable, StoreError: nothing was marked.
    """
    store = open_store(arguments.root)
    target = None if arguments.object_store is None else name_bucket(arguments.object_store, store)
    agent = start_agent(store)
    seen = look_at_nodes(store)
    there = None if target is None else list_bucket(target)
    chosen = [row for row in list_checkpoints(seen, there) if row.checkpoint_id == arguments.id and row.save_id]
    if not chosen:
        where = "" if arguments.object_store else " Add --object-store URL if a bucket has it."
        raise describe_absent(store, seen, arguments.id, where)
    marked = _mark_nodes(agent, seen, chosen, is_rejected=not arguments.undo)
    for row in chosen:
        _mark_buckets(agent, seen, row, target, marked)
    lines = list(_describe(marked, seen))
    if arguments.json:
        print(json.dumps({**asdict(marked), "next_steps": list_next_steps(lines)}, indent=2))
    else:
        print("\n".join(lines))
    return ExitCode.UNREACHABLE if marked.not_reached else ExitCode.OK


def _mark_nodes(agent: AgentAddress, seen: NodesSeen, chosen: Sequence[CheckpointSeen], *, is_rejected: bool) -> Marked:
    save_ids = tuple(row.save_id for row in chosen)
    with AgentClient(agent) as client:
        answer = client.call("POST", "/v1/reject", {"save_ids": save_ids, "is_rejected": is_rejected})
    reached, not_reached = [seen.own_node, *map(str, answer["reached"])], answer["not_reached"]
    silent = {str(node): one_line(why) for node, why in not_reached.items()}
    return Marked(chosen[0].checkpoint_id, save_ids, is_rejected, reached, [], silent)


def _mark_buckets(
    agent: AgentAddress, seen: NodesSeen, row: CheckpointSeen, target: ObjectTarget | None, marked: Marked
) -> None:
    """Marks the save in its own bucket, by this node's agent, which has the credentials, and in the one the user names."""
    for url in list_urls(row, seen, target):
        try:
            if target is not None and url == target.url:
                with print_if_slow(url), closing(open_client(target)) as client:
                    is_there = Bucket(client).mark_rejected(
                        row.checkpoint_id, row.save_id, is_rejected=marked.is_rejected
                    )
            else:
                is_there = _ask_agent(agent, url, row, is_rejected=marked.is_rejected)
        except ReplicatedCkptError as exc:
            # The nodes have the mark already: the bucket is reported as not reached, like a silent node.
            marked.not_reached[url] = str(exc)
            continue
        marked.buckets += [url] if is_there and url not in marked.buckets else []


def _ask_agent(agent: AgentAddress, url: str, row: CheckpointSeen, *, is_rejected: bool) -> bool:
    named: Mapping[str, object] = {"checkpoint_id": row.checkpoint_id, "save_id": row.save_id, "url": url}
    with print_if_slow(url), AgentClient(agent) as client:
        answer = client.call("POST", "/v1/object/reject", {**named, "is_rejected": is_rejected})
    return answer["is_there"] is True


def _describe(marked: Marked, seen: NodesSeen) -> Iterator[str]:
    done = "rejected" if marked.is_rejected else "no longer rejected"
    places = ", ".join([seen.list_names(marked.nodes), *marked.buckets])
    yield f"{marked.checkpoint_id}: {done}, on: {places}"
    for place, why in sorted(marked.not_reached.items()):
        is_node = place in seen.addresses
        yield f"{seen.label(place) if is_node else place}: not reached: {why}"
    if seen.addresses.keys() & marked.not_reached.keys():
        yield "a node that was not reached gets the mark from the others once it is back"
    if marked.not_reached.keys() - seen.addresses.keys():
        yield "next step: run the same command again once the bucket answers"
