"""Training jobs in the simulation: saves and loads of several ranks, driven call by call as DCP drives them."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp import node as node_module
from replicated_ckpt.dcp import reader as reader_module
from replicated_ckpt.dcp import seen_lineage
from replicated_ckpt.dcp import world as world_module
from replicated_ckpt.dcp import writer as writer_module
from replicated_ckpt.dcp.blackboard import Blackboard
from replicated_ckpt.dcp.meeting import _surveyed
from replicated_ckpt.dcp.node import NodePost
from replicated_ckpt.dcp.survey import Survey
from replicated_ckpt.dcp.world import World
from replicated_ckpt.errors import ReplicatedCkptError, ReplicatedCkptWarning, StoreUnavailable
from replicated_ckpt.stores.local import LocalStore
from tests.fault.torture.cluster import Cluster
from tests.fault.torture.contents import State, contents, part_of
from tests.fault.torture.network import Actor, Killed


@dataclass(frozen=True)
class Saved:
    """How a save ended. `error` None: it was acknowledged, with so many copies, and these warnings."""

    error: BaseException | None
    copies_made: int = 0
    warnings: tuple[str, ...] = ()


class Job:
    """The ranks of one world; `nodes[rank]` is the node of each. It lives until it is ended or a rank is killed."""

    def __init__(self, cluster: Cluster, nodes: Sequence[int], copies: int) -> None:
        self.cluster = cluster
        self.nodes = list(nodes)
        self.copies = copies
        self.actors = [Actor(node, is_agent=False) for node in nodes]
        self.store = dist.HashStore()
        seen_lineage._seen.clear()  # a new process
        self.session = cluster._uuid4().hex
        self._writers: dict[bool, list[ReplicatedWriter]] = {}

    @property
    def is_dead(self) -> bool:
        return any(actor.is_dead for actor in self.actors)

    def end(self) -> None:
        for writers in self._writers.values():
            for writer in writers:
                writer._held.close()
        self._writers.clear()
        for actor in self.actors:
            actor.is_dead = True

    # Saving ------------------------------------------------------------------------------------------------------

    def save(self, checkpoint_id: str, attempt: int, *, overwrite: bool) -> Saved:
        """One `dcp.save`; a rank that is killed takes the job along."""
        if overwrite not in self._writers:
            self._writers[overwrite] = [
                ReplicatedWriter(self.cluster.nodes[node].root, copies=self.copies, overwrite=overwrite)
                for node in self.nodes
            ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ReplicatedCkptWarning)
            try:
                made = self._save(self._writers[overwrite], checkpoint_id, attempt)
            except (ReplicatedCkptError, Killed, FirstError) as exc:
                return Saved(exc)
            finally:
                if self.is_dead:
                    self.end()
        said = tuple(str(entry.message) for entry in caught if issubclass(entry.category, ReplicatedCkptWarning))
        return Saved(None, made, said)

    def _save(self, writers: list[ReplicatedWriter], checkpoint_id: str, attempt: int) -> int:
        state = contents(attempt, len(self.nodes))
        planners = [DefaultSavePlanner() for _ in writers]

        def local(rank: int) -> Any:
            writer, planner = writers[rank], planners[rank]
            writer.reset(checkpoint_id)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            planner.set_up_planner(part_of(state, rank), writer.storage_meta(), rank == 0)
            return writer.prepare_local_plan(planner.create_local_plan())

        def planned(rank: int) -> Any:
            plans, metadata = planners[0].create_global_plan(local_plans)
            return writers[rank].prepare_global_plan(plans), metadata

        local_plans = self._on_all(local)
        ((plans, metadata),) = self._on_all(planned, ranks=[0])
        for planner, plan in zip(planners, plans, strict=True):
            planner.finish_plan(plan)
        results = self._on_all(lambda rank: writers[rank].write_data(plans[rank], planners[rank]).wait())
        self._on_all(lambda rank: writers[rank].finish(metadata, results), ranks=[0])
        return min((writer.last_save.copies_made for writer in writers if writer.last_save is not None), default=0)

    def _on_all(self, step: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """One step on every rank; DCP lets all of them go through it before anybody learns of an error."""
        found, errors = [], []
        for rank in range(len(self.nodes)) if ranks is None else ranks:
            with self.as_rank(rank):
                try:
                    found.append(step(rank))
                except ReplicatedCkptError as exc:
                    errors.append(exc)
        if errors:
            raise FirstError(errors)
        return found

    # Loading -----------------------------------------------------------------------------------------------------

    def load(self, checkpoint_id: str, readers: int) -> list[tuple[int, State]]:
        """One `dcp.load` of everything on the first `readers` ranks; the attempt that each got, and its tensors.

        Raises:
            ReplicatedCkptError: as the ranks would.
        """
        surveys: list[Survey] = []

        def met(
            store: LocalStore,
            world: World,
            given_id: str | None,
            _: object,
            prepared: Callable[[Survey], Survey],
            *,
            lineage: str,
        ) -> Survey:
            if not surveys:
                posts = [
                    {"checkpoint_id": given_id, "node": self._post(rank).to_json()} for rank in range(len(self.nodes))
                ]
                surveys.append(prepared(_surveyed(store, world, posts, lineage=lineage)))
            return surveys[0]

        found = []
        with mock.patch.object(reader_module, "met", met):
            for rank, node in enumerate(self.nodes[:readers]):
                with self.as_rank(rank):
                    found.append(self._loaded(ReplicatedReader(self.cluster.nodes[node].root), checkpoint_id, rank))
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
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return int(state["attempt"][0]), state

    # What a rank sees --------------------------------------------------------------------------------------------

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        world = World(rank, len(self.nodes), Blackboard(self.store, rank, len(self.nodes)), "world")
        with (
            self.cluster.network.acting(self.actors[rank]),
            mock.patch.object(writer_module, "world_of_call", return_value=world),
            mock.patch.object(reader_module, "world_of_call", return_value=world),
            mock.patch.object(reader_module, "calling", return_value=True),
            mock.patch.object(node_module, "node_post", lambda *_: self._post(rank)),  # noqa: PT008 - it may raise
            mock.patch.object(writer_module, "node_post", lambda *_: self._post(rank)),  # noqa: PT008 - it may raise
            mock.patch.object(world_module._SESSION, "name", self.session, create=True),
        ):
            yield

    def _post(self, rank: int) -> NodePost:
        """Presents the node; its agent is started if it does not run, as a rank does."""
        node = self.cluster.nodes[self.nodes[rank]]
        if self.actors[rank].is_dead:
            raise StoreUnavailable("this rank", "present", "node", "it is dead")
        node.boot()
        inode = f"store{node.index}"
        address, invitation = node.address(), node.endpoint.invitation()
        host, boot = f"host{node.index}", f"boot{node.index}"
        return NodePost(node.service.node_id, host, boot, inode, None, address, invitation)


class FirstError(Exception):
    """What DCP's CheckpointException carries: the errors of one step."""

    def __init__(self, errors: Sequence[ReplicatedCkptError]) -> None:
        super().__init__(*errors)
        self.errors = tuple(errors)
