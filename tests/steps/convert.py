"""Steps: exports, imports, and torch's own reader of torch files."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from replicated_ckpt import export_checkpoint, import_checkpoint
from tests.harness.cluster import Digests
from tests.steps.context import Context
from tests.steps.state import OTHER_SEED, digests_of
from tests.steps.states import StateDict, build, digests


def export(context: Context, checkpoint_id: str, to: str) -> Digests:
    """Exports to a torch file. Returns the digests of its contents."""
    export_checkpoint(checkpoint_id, to, format="torch", root=context.root, trust_pickles=True)
    state = torch.load(to, weights_only=False)
    return {f"{kind}/{name}": value for kind, values in state.items() for name, value in digests(values).items()}


def bring_in(context: Context, path: str, checkpoint_id: str) -> None:
    """Imports a torch file into this node's store."""
    import_checkpoint(path, checkpoint_id, format="torch", root=context.root, copies=1, trust_pickles=True)


def read_alone(context: Context, checkpoint_id: str, rank: int) -> Digests | None:
    """One rank reads everything that the metadata names. The others do nothing meanwhile."""
    if context.rank != rank:
        return None
    state: StateDict = {}
    reader = context.reader()
    reader.reset(checkpoint_id)
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, reader, planner=planner, no_dist=True)
    return {f"{kind}/{name}": value for kind, values in state.items() for name, value in digests(values).items()}


def broadcast(context: Context, path: str, kind: str, checkpoint_id: str) -> Digests:
    """Rank 0 reads tensors from a torch file with torch's own reader, and broadcasts them. All ranks save what they
    received.
    """
    state = build(kind, OTHER_SEED, context.rank, context.world_size)
    values = state.state_dict()
    dcp.load(
        {kind: values},
        checkpoint_id=path,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
    )
    dcp.save({kind: values}, checkpoint_id=checkpoint_id, storage_writer=context.writer())
    state.load_state_dict(values)
    return digests_of({kind: state})
