"""The coordinator's decision about one save, in the form that every rank reads, and the receipt of each rank."""

import os
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from shlex import quote
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.config import CheckpointIdFrom
from replicated_ckpt.core.divergence import Turn
from replicated_ckpt.core.manifest import find_shared
from replicated_ckpt.core.protocol.placement import PlacedNode, Placement, place_copies
from replicated_ckpt.core.upkeep.upload_plan import UploadPlan
from replicated_ckpt.dcp.agreement.node_post import NodePost, id_under
from replicated_ckpt.dcp.c10d.group_pool import check_wanted_alike
from replicated_ckpt.dcp.planning.cached_plan import find_whole, planned_bytes
from replicated_ckpt.environment import DOMAIN_ENV
from replicated_ckpt.errors import CheckpointIdMismatch, ConfigInvalid
from replicated_ckpt.stores.local.directories.intent import NOTHING_ANNOUNCED, Announced, Intent
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.wording import plural

OBJECTS_BYTES_MAX = 8 << 30
"""The bound for all objects of one shard together: their size is known only once they are pickled."""
_ITEM_BYTES_MAX = 4096
"""Container, alignment and checksums of a small item. A large item needs more, but far less than its own bytes."""
_SHARD_BYTES_MIN = 1 << 20


def announce(plans: Sequence[SavePlan]) -> Announced:
    """An upper bound of the bytes that a save of these plans writes, with room for planners that write wider types than
    planned.

    Returns NOTHING_ANNOUNCED if plan caching (`enable_plan_caching`) has left out an unchanged plan. A cached plan of a
    CachedSavePlanner contains the whole plan, from which the bound follows.
    """
    plans = [find_whole(plan) for plan in plans]
    # Plan caching replaces an unchanged plan by an empty one, from which no bound follows.
    if not all(plan.usable for plan in plans):
        return NOTHING_ANNOUNCED
    sizes = [_shard_bytes_max(plan) for plan in plans]
    return Announced(max(sizes, default=0), sum(sizes))


def tensor_bytes(plan: SavePlan) -> int | None:
    """Bytes of the tensors that a plan writes, as planned. None: DCP has left the plan out, because it did not change."""
    plan = find_whole(plan)
    return _tensor_bytes(plan) if plan.usable else None


def _shard_bytes_max(plan: SavePlan) -> int:
    objects = OBJECTS_BYTES_MAX if any(item.tensor_data is None for item in plan.items) else 0
    # Twice the planned bytes: a planner may write a wider type than it planned, such as float32 for bfloat16.
    return _SHARD_BYTES_MIN + 2 * _tensor_bytes(plan) + len(plan.items) * _ITEM_BYTES_MAX + objects


def _tensor_bytes(plan: SavePlan) -> int:
    return sum(map(planned_bytes, plan.items))


STAYS = ("nodes", "node_by_rank", "placement", "helpers")
"""Fields that nearly always equal those of the decision before. All fields that grow with the number of nodes are here."""
_NAME_IT = (
    'Pass an id: dcp.save(..., checkpoint_id="step-10"). If other code calls dcp.save, as _Checkpointer '
    'does, call writer.reset("step-10") first. The deprecated save_state_dict takes no id.'
)


@dataclass(frozen=True)
class SaveDecision:
    """One attempt at one save. `nodes` are in rank order; `nodes[node_by_rank[r]]` is the node of rank r.

    `unreached` are nodes whose agents did not answer when the save was opened. Their ranks open it in their own stores,
    with `session` and `overwrite`. These nodes hold no copies for others. `known_layout`: the save whose results the
    coordinator has cached. A rank may refer to its own entries in them.
    """

    save_id: str
    checkpoint_id: str
    sequence: int
    nodes: tuple[NodePost, ...]
    node_by_rank: tuple[int, ...]
    placement: Placement
    session: str = ""
    overwrite: bool = False
    unreached: tuple[str, ...] = ()
    upload: UploadPlan | None = None
    lineage: str = ""
    announced: Announced = NOTHING_ANNOUNCED
    ticket: str = field(default="", repr=False)
    known_layout: str = ""
    file_number: int = 0
    """The first of the numbers in the names of its shards. No other version of the checkpoint on its nodes has them."""
    turn: Turn | None = None
    """The values that the ranks compare in this save. None: they compare nothing."""
    helpers: tuple[tuple[int, ...], ...] = ()
    """By rank: the ranks that copy its shard to their nodes from their own memory. Empty if no rank has helpers."""

    def holders_for(self, node_id: str) -> tuple[str, ...]:
        """All nodes that may take copies for a node, in the order of preference: its buddies, then nodes of other hosts."""
        buddies, domains = self.placement.buddies_by_node[node_id], self._domains_by_node
        taken = [domains[node] for node in (node_id, *buddies) if node not in self._silent]
        others = self.placement.substitutes(node_id)
        # First those that share the fewest failure domains with the other copies: one outage must not take both.
        order = (*buddies, *sorted(others, key=lambda other: find_shared(domains[other], taken)))
        return tuple(node for node in order if node not in self._silent)

    def buddies_of(self, node_id: str) -> tuple[str, ...]:
        """The nodes that are to hold copies for a node."""
        buddies = self.placement.buddies_by_node[node_id]
        # The usual case. Substitutes would cost a sort of all nodes, for each node of the job.
        if self._silent.isdisjoint(buddies):
            return buddies
        return self.holders_for(node_id)[: self.placement.copies - 1]

    @property
    def intent(self) -> Intent:
        nodes = tuple(sorted(node.node_id for node in self.nodes))
        coordinator, announced = self.node_of(0).node_id, self.announced
        return Intent(
            self.save_id,
            self.checkpoint_id,
            self.session,
            self.overwrite,
            nodes=nodes,
            coordinator=coordinator,
            announced=announced,
            ticket=self.ticket,
        )

    def node_of(self, rank: int) -> NodePost:
        return self.nodes[self.node_by_rank[rank]]

    def address_of(self, node_id: str) -> AgentAddress:
        return self._address_by_node[node_id]

    def ranks_of(self, node_id: str) -> tuple[int, ...]:
        return tuple(self._ranks_by_node[node_id])

    # Computed once: every rank looks up nodes, and the time of searches would grow with the square of their number.
    @cached_property
    def _silent(self) -> frozenset[str]:
        return frozenset(self.unreached)

    @cached_property
    def _domains_by_node(self) -> Mapping[str, tuple[str, ...]]:
        return {node.node_id: node.domains for node in self.nodes}

    @cached_property
    def _address_by_node(self) -> Mapping[str, AgentAddress]:
        return {node.node_id: node.address for node in self.nodes}

    @cached_property
    def _ranks_by_node(self) -> Mapping[str, list[int]]:
        ranks: dict[str, list[int]] = {node.node_id: [] for node in self.nodes}
        for rank, index in enumerate(self.node_by_rank):
            ranks[self.nodes[index].node_id].append(rank)
        return ranks

    @cached_property
    def owners_by_helper(self) -> Mapping[int, Sequence[int]]:
        """The ranks whose shards a rank copies."""
        owners: dict[int, list[int]] = {}
        for owner, helpers in enumerate(self.helpers):
            for helper in helpers:
                owners.setdefault(helper, []).append(owner)
        return owners

    def to_json(self) -> dict[str, Any]:
        """The fields that every rank reads. Invitations are removed: only the coordinator uses them, before it decides."""
        return asdict(replace(self, nodes=tuple(replace(node, invitation="") for node in self.nodes)))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "SaveDecision":
        placement = fields["placement"]
        return cls(
            fields["save_id"],
            fields["checkpoint_id"],
            fields["sequence"],
            tuple(NodePost.from_json(node) for node in fields["nodes"]),
            tuple(fields["node_by_rank"]),
            Placement(
                placement["copies"],
                tuple(tuple(group) for group in placement["groups"]),
                tuple(placement["shared_domain"]),
            ),
            fields["session"],
            fields["overwrite"],
            tuple(fields["unreached"]),
            None if fields["upload"] is None else UploadPlan(**fields["upload"]),
            fields["lineage"],
            Announced(**fields["announced"]),
            str(fields["ticket"]),
            str(fields["known_layout"]),
            int(fields["file_number"]),
            None if fields["turn"] is None else Turn(**fields["turn"]),
            tuple(tuple(helpers) for helpers in fields["helpers"]),
        )


@dataclass(frozen=True)
class SavePost:
    """The post of each rank before a save. `checkpoint_id` None: the rank uses the coordinator's.

    `memory_bytes`: the size that a store in memory may reach; None for a store on a disk. `wants`: the arguments of the
    rank's writer that must be equal on all ranks, as text. `items`: the number of items in its plan, before DCP drops
    those that several ranks have. `plan_digest`: equal for equal items; "" on a rank that copies no other rank's shard.
    `help_token`: see `HelpPlans.token`. `takes_copies`: other ranks may copy its shards.
    """

    checkpoint_id: str | None
    node: NodePost
    memory_bytes: int | None = None
    wants: Mapping[str, str] = field(default_factory=dict)
    items: int = 0
    plan_digest: str = ""
    help_token: str = ""
    takes_copies: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "SavePost":
        node = NodePost.from_json(fields["node"])
        memory_bytes, wants = fields.get("memory_bytes"), fields.get("wants", {})
        plan_digest, help_token = str(fields["plan_digest"]), str(fields["help_token"])
        takes_copies = bool(fields["takes_copies"])
        given = memory_bytes, wants, fields["items"], plan_digest, help_token, takes_copies
        return cls(fields["checkpoint_id"], node, *given)


def decide(posts: Sequence[SavePost], copies: int, save_id: str, plans: Sequence[SavePlan] = ()) -> SaveDecision:
    """The decision that follows from the ranks' posts, and from DCP's plans for them, in rank order.

    Raises:
        CheckpointIdMismatch: the ranks named different checkpoints. A rank that uses the coordinator's id names none.
        ConfigInvalid: two different stores claim the same identity, or the ranks want different saves.
    """
    checkpoint_id = posts[0].checkpoint_id
    given = {rank: post.checkpoint_id for rank, post in enumerate(posts) if post.checkpoint_id is not None}
    if checkpoint_id is None:
        raise ConfigInvalid("The coordinator sent no checkpoint id.", _NAME_IT)
    # Ranks that disagree would write the parts of two checkpoints into one save.
    if len(set(given.values())) > 1:
        raise CheckpointIdMismatch(given)
    check_wanted_alike([post.wants for post in posts], [post.node.host for post in posts])
    nodes: dict[str, NodePost] = {}
    for post in posts:
        known = nodes.setdefault(post.node.node_id, post.node)
        # A cloned disk brings a second store with the same node id: copies in one would count for the other.
        _check_same_store(known, post.node)
    place, states = {node: index for index, node in enumerate(nodes)}, _find_states(posts)
    return SaveDecision(
        save_id,
        checkpoint_id,
        0,
        tuple(nodes.values()),
        tuple(place[post.node.node_id] for post in posts),
        place_copies([PlacedNode(one.node_id, one.domains, states[one.node_id]) for one in nodes.values()], copies),
        announced=announce(plans),
    )


def _find_states(posts: Sequence[SavePost]) -> Mapping[str, str]:
    """By node: a text that is equal for nodes whose ranks have the same items; "" if a rank has posted no digest."""
    digests: dict[str, list[str]] = {}
    for post in posts:
        digests.setdefault(post.node.node_id, []).append(post.plan_digest)
    return {node: " ".join(sorted(found)) if all(found) else "" for node, found in digests.items()}


def name_checkpoint(
    root: str, given_id: str | os.PathLike[str] | None, id_from: CheckpointIdFrom, *, is_coordinator: bool
) -> str | None:
    """The checkpoint that a rank names when it registers; None if it uses the coordinator's.

    Raises:
        ConfigInvalid: the rank was passed no id, or an id that cannot be under `root`.
    """
    if id_from == "coordinator" and not is_coordinator:
        return None
    if not isinstance(given_id, str | os.PathLike):
        what = "no checkpoint_id" if given_id is None else f"{given_id!r} as its checkpoint_id"
        raise ConfigInvalid(f"dcp.save was given {what}.", _NAME_IT)
    return id_under(root, given_id)


def _check_same_store(known: NodePost, other: NodePost) -> None:
    # Inode numbers of different hosts cannot be compared; their agents' tokens can.
    same_host = known.boot_id == other.boot_id
    if known.store_inode != other.store_inode if same_host else known.address.token != other.address.token:
        raise ConfigInvalid(
            f"Two different stores have the identity {known.node_id}: {known.root} on {known.host} and {other.root} on "
            f"{other.host}.",
            "One is a copy of the other (a cloned disk). End the job and its agent. Then make the copy a new node: "
            f"{_forget_identity(other)}; or, if the other one is the copy, {_forget_identity(known)}.",
        )
    if known.domain != other.domain:
        raise ConfigInvalid(
            f"Ranks of node {known.node_id} name different domains: {known.domain!r} and {other.domain!r}.",
            "Pass the same ReplicatedWriter(domain=...) on all ranks of one node.",
        )


def _forget_identity(node: NodePost) -> str:
    """The command to run on a copy of a store: its `.agent` has the original's tokens and its agent's address."""
    root = quote(node.root or "ROOT")
    return f"`rm -r {root}/node.json {root}/.agent` on {node.host}"


def list_weaknesses(decision: SaveDecision, copies: int, posts: Sequence[SavePost]) -> list[str]:
    """Descriptions of each way in which this save protects less than was asked for."""
    placement = decision.placement
    found = []
    if placement.copies < copies:
        nodes = plural(placement.copies, "node")
        found.append(
            f"{copies} copies are wanted, but {nodes} can hold only {placement.copies}. Start ranks on more nodes, "
            f"each with its own root, or ask for {placement.copies} (copies={placement.copies}, or --copies of a "
            "command)"
        )
    if placement.shared_domain:
        count = len({node.domains[0] for node in decision.nodes})
        is_named = any(node.domain for node in decision.nodes)
        places = plural(count, "failure domain" if is_named else "host")
        one_place = "in one domain" if is_named else "on one host"
        found.append(
            f"the {len(decision.nodes)} nodes of this save are {('in' if is_named else 'on')} {places}. For the shards of "
            f"{plural(len(placement.shared_domain), 'node')}, two copies lie {one_place}, "
            "and are lost with it. Start ranks on more hosts. If nodes of one host fail independently, name a failure "
            f"domain for each: ReplicatedWriter(domain=...) or {DOMAIN_ENV}"
        )
    # A store whose ranks have different boot ids is mounted on several hosts: its copies are lost together.
    boots: dict[str, set[str]] = {}
    for post in posts:
        boots.setdefault(post.node.node_id, set()).add(post.node.boot_id)
    found += [
        f"several hosts see the store of node {node}. Copies on a shared file system protect nothing: pass a root "
        "on each node's own disk"
        for node, seen in boots.items()
        if len(seen) > 1
    ]
    return found


@dataclass(frozen=True)
class ShardReceipt:
    """One shard as it was written. `holders`: the nodes that acknowledged a copy, the owner's first.

    If the node's agent writes the shard, the size is 0, and only the name is known. `is_linked`: each holder has
    hard-linked the file of a committed save.
    """

    name: str
    size_bytes: int
    crc32c: int
    holders: tuple[str, ...]
    is_linked: bool = False

    @property
    def is_submitted(self) -> bool:
        """Whether the node's agent writes this shard."""
        return self.size_bytes == 0


@dataclass(frozen=True)
class Receipt:
    """A rank's record of what it wrote, and how long that took. `aborted`: why another process aborted the save, or "".

    `replicas` is the rank's report of the values that ranks compare (`core.divergence`). `copies` are the shards of other
    ranks that this rank wrote from its own memory.
    """

    shards: tuple[ShardReceipt, ...] = ()
    aborted: str = ""
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    replicas: bytes = b""
    copies: tuple[ShardReceipt, ...] = ()

    @property
    def is_submitted(self) -> bool:
        """Whether the node's agent writes any shard of this rank."""
        return any(shard.is_submitted for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "replicas": b64encode(self.replicas).decode()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Receipt":
        shards, copies = (
            tuple(ShardReceipt(**{**shard, "holders": tuple(shard["holders"])}) for shard in fields[part])
            for part in ("shards", "copies")
        )
        phases = {str(name): float(spent) for name, spent in fields["phases"].items()}
        aborted, seconds = fields["aborted"], float(fields["seconds"])
        return cls(shards, aborted, seconds, phases, b64decode(fields["replicas"]), copies)
