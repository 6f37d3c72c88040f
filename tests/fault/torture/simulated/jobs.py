"""Training jobs in the simulation: saves and loads of several ranks, with the calls in DCP's order."""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageWriter

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.dcp.agreement.node_post import NodePost
from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.rendezvous import _remember, _survey
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.errors import ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore
from tests.fault.torture.contents import State, contents, part_of
from tests.fault.torture.simulated.cluster import Cluster
from tests.fault.torture.simulated.network import Actor, Killed
from tests.fault.torture.simulated.replacements import RankView, Seen

T = TypeVar("T")
SAVE_S = 1.0
"""Duration of a save: two saves are never decided at the same time."""


@dataclass(frozen=True)
class Policy:
    """How a job saves. `keep_last` None: nothing is ever removed. `ack`: the level of saves that are not submitted to
    agents.
    """

    copies: int = 2
    keep_last: int | None = None
    object_store: str | None = None
    ack: Literal["local", "peer"] = "peer"


@dataclass(frozen=True)
class Saved:
    """The result of a save. `error` None: it was acknowledged with this number of copies and these warnings."""

    error: BaseException | None
    copies_made: int = 0
    warnings: tuple[str, ...] = ()


@dataclass
class _Call:
    """One running `dcp.save` or `dcp.load`. `said`: the warnings of all ranks."""

    said: list[str] = field(default_factory=list)
    met: Callable[..., Any] | None = None


class Job:
    """The ranks of one world. `nodes[rank]` is the node of each rank. The job lives until it is ended, or until a rank
    is killed.
    """

    def __init__(self, cluster: Cluster, nodes: Sequence[int], policy: Policy) -> None:
        self.cluster = cluster
        self.nodes = list(nodes)
        self.policy = policy
        self.actors = [Actor(node, is_agent=False) for node in nodes]
        for rank, actor in enumerate(self.actors):
            actor.release = partial(self._release, rank)
        cluster.ranks += self.actors
        self.store = dist.HashStore()
        self.session = cluster.draw_uuid().hex
        self._seen: Seen = {}
        self._writers: dict[tuple[bool, bool], list[ReplicatedWriter]] = {}

    @property
    def is_dead(self) -> bool:
        return any(actor.is_dead for actor in self.actors)

    def _release(self, rank: int) -> None:
        for writers in self._writers.values():
            attempt = writers[rank]._attempt
            if attempt is not None:
                attempt.close()

    def end(self) -> None:
        for actor in self.actors:
            actor.release()
        self._writers.clear()
        for actor in self.actors:
            self.cluster.faults.die(actor)
        self.cluster.ranks[:] = [actor for actor in self.cluster.ranks if not actor.is_dead]

    # Saving ------------------------------------------------------------------------------------------------------

    def save(self, checkpoint_id: str, attempt: int, *, overwrite: bool, hands_over: bool = False) -> Saved:
        """One `dcp.save`. If a rank is killed, the whole job dies.

        `hands_over`: as `dcp.async_save` saves in its thread, with ack="peer". Threads then do the work that ranks and
        agents still have to do.
        """
        if (overwrite, hands_over) not in self._writers:
            ack = "peer" if hands_over else self.policy.ack
            kept = [self._writer(node, overwrite=overwrite, ack=ack) for node in self.nodes]
            self._writers[overwrite, hands_over] = kept
        writers = self._writers[overwrite, hands_over]
        self.cluster.wait(SAVE_S)
        call = _Call()
        try:
            self._save(writers, call, checkpoint_id, attempt, is_submitted=hands_over)
        except (ReplicatedCkptError, Killed, FirstError) as exc:
            return Saved(exc)
        else:
            if self.is_dead:
                return Saved(Killed("a rank was killed before all had returned"))
        finally:
            if self.is_dead:
                self.end()
        made = min((writer.last_save.copies_made for writer in writers if writer.last_save is not None), default=0)
        return Saved(None, made, tuple(call.said))

    def _writer(self, node: int, *, overwrite: bool, ack: Any) -> ReplicatedWriter:
        keep_last = self.policy.keep_last
        return ReplicatedWriter(
            self.cluster.nodes[node].root,
            copies=self.policy.copies,
            overwrite=overwrite,
            ack=ack,
            retention=None if keep_last is None else Retention(keep_last=keep_last),
            object_store=self.policy.object_store,
        )

    def save_with_stock_torch(self, checkpoint_id: str, attempt: int) -> None:
        """Saves with torch's own writer to node-local disks: each node has its ranks' shards, and one node has
        `.metadata`.
        """
        places = [self.cluster.nodes[node].root / checkpoint_id for node in self.nodes]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        self._save([FileSystemWriter(place, sync_files=False) for place in places], _Call(), checkpoint_id, attempt)
        for node, place in zip(self.nodes, places, strict=True):  # Loads order these checkpoints by their time stamps.
            now = self.cluster.unix_now(node)
            for path in place.iterdir():
                os.utime(path, (now, now))

    def _save(
        self,
        writers: Sequence[StorageWriter],
        call: _Call,
        checkpoint_id: str,
        attempt: int,
        *,
        is_submitted: bool = False,
    ) -> None:
        state = contents(attempt, len(self.nodes))
        planners = [DefaultSavePlanner() for _ in writers]

        def local(rank: int) -> Any:
            writer, planner, part = writers[rank], planners[rank], part_of(state, rank)
            if isinstance(writer, ReplicatedWriter):
                if is_submitted:
                    part = writer.stage(part)
                    writer.synchronize_staging()
                writer.reset(checkpoint_id)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            planner.set_up_planner(part, writer.storage_meta(), rank == 0)
            return writer.prepare_local_plan(planner.create_local_plan())

        def planned(rank: int) -> Any:
            plans, metadata = planners[0].create_global_plan(local_plans)
            return writers[rank].prepare_global_plan(plans), metadata

        local_plans = self._on_all(call, local)
        ((plans, metadata),) = self._on_all(call, planned, ranks=[0])
        for planner, plan in zip(planners, plans, strict=True):
            planner.finish_plan(plan)
        results = self._on_all(call, lambda rank: writers[rank].write_data(plans[rank], planners[rank]).wait())
        gathered = pickle.loads(pickle.dumps(results))  # As DCP does.
        self._on_all(call, lambda rank: writers[rank].finish(metadata, gathered), ranks=[0])

    def _on_all(self, call: _Call, step: Callable[[int], T], ranks: Sequence[int] | None = None) -> list[T]:
        """Runs one step on every rank. As in DCP, all ranks finish the step before any of them gets an error."""
        found: list[T] = []
        errors: list[ReplicatedCkptError | OSError] = []
        for rank in range(len(self.nodes)) if ranks is None else ranks:
            with self.as_rank(rank, call):
                try:
                    found.append(step(rank))
                except (ReplicatedCkptError, OSError) as exc:
                    errors.append(exc)
        if errors:
            raise FirstError(errors)
        return found

    # Loading -----------------------------------------------------------------------------------------------------

    def load(self, checkpoint_id: str, readers: int, *, with_bucket: bool = False) -> list[tuple[int, State]]:
        """One `dcp.load` of everything on the first `readers` ranks. Returns for each rank the attempt and its tensors.

        Raises:
            ReplicatedCkptError: as the ranks would.
        """
        surveys: list[Survey] = []

        def met(
            store: LocalStore,
            world: World,
            given_id: str | None,
            opened_bucket: Callable[[], Bucket | None],
            *,
            lineage: str,
            in_step: bool = False,
            max_tries: int | None = None,
        ) -> Survey:
            assert (in_step, max_tries) == (False, None), "each rank passes an id"
            if not surveys:
                posts = [
                    {"checkpoint_id": given_id, "node": self._post(rank).to_json()} for rank in range(len(self.nodes))
                ]
                surveys.append(_survey(store, world, posts, opened_bucket(), lineage))
            return _remember(store, surveys[0])

        found, call = [], _Call(met=met)
        place = self.policy.object_store if with_bucket else None
        for rank, node in enumerate(self.nodes[:readers]):
            with self.as_rank(rank, call):
                reader = ReplicatedReader(self.cluster.nodes[node].root, object_store=place)
                found.append(self._loaded(reader, checkpoint_id, rank))
        return found

    def _loaded(self, reader: ReplicatedReader, checkpoint_id: str, rank: int) -> tuple[int, State]:
        reader.reset(checkpoint_id)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, rank == 0)
        described: Mapping[str, Any] = metadata.state_dict_metadata
        state = {name: torch.full(tuple(entry.size), -1, dtype=torch.int64) for name, entry in described.items()}
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata, rank == 0)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        self.cluster.operations.reach("load.planned")
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return int(state["attempt"][0]), state

    # A rank's view --------------------------------------------------------------------------------------------

    @contextmanager
    def as_rank(self, rank: int, call: _Call) -> Iterator[None]:
        """The block runs as this rank. Raises Killed if the rank is dead, or dies in the block."""
        actor, operation = self.actors[rank], self.cluster.operations.running
        if actor.is_dead:
            raise Killed(f"rank {rank} is dead")
        world = World(rank, len(self.nodes), Blackboard(self.store, rank, len(self.nodes)), "world")
        previous, view = operation.rank, RankView(world, lambda: self._post(rank), self.session, self._seen, call.said)
        view.met = call.met
        operation.rank = view
        try:
            with self.cluster.network.acting(actor):
                yield
        finally:
            operation.rank = previous
        if actor.is_dead:
            raise Killed(f"rank {rank} was killed")

    def _post(self, rank: int) -> NodePost:
        """Registers the rank's node. As a real rank does, starts the agent if none runs."""
        node = self.cluster.nodes[self.nodes[rank]]
        if self.actors[rank].is_dead:
            raise StoreUnavailable("this rank", "present", "node", "it is dead")
        node.boot()
        inode = f"store{node.index}"
        with self.cluster.network.acting(self.actors[rank]):  # The invitation expires by this clock.
            address, invitation = node.address(), node.endpoint.invitation()
        host, boot = f"host{node.index}", f"boot{node.index}"
        return NodePost(node.service.node_id, host, boot, inode, None, address, invitation=invitation)


class FirstError(Exception):
    """The errors of one step, as DCP's CheckpointException carries them."""

    def __init__(self, errors: Sequence[ReplicatedCkptError | OSError]) -> None:
        super().__init__(*errors)
        self.errors = tuple(errors)
