"""The save that a load reads, found and then kept: once its agents are told of it nothing removes it on their nodes."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.survey import Survey, Surveyor
from replicated_ckpt.errors import CheckpointNotFound, ManifestVersionUnknown, ReplicatedCkptError, ShardLost
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.deadline import is_time_out
from replicated_ckpt.stores.peer.fan_out import FanOut

SURVEYS_MAX = 3
"""In one load, where another job replaces or removes checkpoints meanwhile."""

Silence = Mapping[str, ReplicatedCkptError]
"""The peers that gave no answer a moment ago, and how: they are not asked again."""


def survey_and_keep(
    look: Callable[[Silence], Surveyor],
    checkpoint_id: str,
    world: World,
    silent: Silence,
    own: Iterable[AgentAddress] = (),
) -> Survey:
    """The survey for a load, whose save its nodes still had when they were told to keep it.

    What another job has replaced or removed in between is looked for once more: there may be a newer one by now, and an
    older one is not taken in its place. `own`: agents that are told, and not asked.

    Raises:
        ReplicatedCkptError: as Surveyor.survey.
    """
    known: set[tuple[str, str]] = set()
    for number in range(1, SURVEYS_MAX + 1):
        surveyor = look(silent)
        try:
            survey = surveyor.survey(checkpoint_id)
        except (CheckpointNotFound, ManifestVersionUnknown, ShardLost):
            if number == SURVEYS_MAX or surveyor.moved <= known:
                raise
            gone = surveyor.moved
        else:
            without, late = tell_load([*survey.addresses, *own], survey, world)
            survey = replace(survey, silent=tuple(sorted(late)))
            gone = surveyor.moved | {(node, survey.found.save_id) for node in without} & surveyor.listed
            if number == SURVEYS_MAX or gone <= known:
                break
        known |= gone
        silent = {**silent, **surveyor.unanswered}
    return survey


def tell_load(addresses: Iterable[AgentAddress], survey: Survey, world: World) -> tuple[set[str], set[str]]:
    """Tells the agents which save is read, so that it stays, and how far its lineage has come: later saves are newer.

    One that does not answer is left out: it holds nothing that this load was told to read from it. Returns the nodes
    that answer that the save does not lie there, as none does where this is a mere look; and those that are silent.
    """
    silent = {*survey.silent}
    if not survey.lineages:
        return set(), silent
    reader = f"{world.session}/{threading.get_ident()}"  # one load at a time
    lineage, sequence = survey.lineages[0].lineage, min(survey.sequence_max, SEQUENCE_FLOOR_MAX)
    document = {"lineage": lineage, "sequence": sequence, "save_id": survey.found.save_id, "reader": reader}
    document["is_load"] = world.is_load

    def tell(address: AgentAddress) -> bool:
        with AgentClient(address) as client:
            return client.call("POST", "/v1/sequence", document).get("is_here") is not False

    outcome = FanOut.run((address for address in addresses if address.node_id not in silent), tell)
    silent |= {address.node_id for address, error in outcome.errors.items() if is_time_out(error)}
    return {address.node_id for address, is_here in outcome.results.items() if not is_here}, silent
