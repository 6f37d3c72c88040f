"""The survey of checkpoints that FileSystemWriter left on the nodes, where nothing of ours answers to an id."""

from collections.abc import Collection, Sequence

from replicated_ckpt.agent.unmanaged.look import UnmanagedLook
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.core.unmanaged.survey import UnmanagedCheckpoint, UnmanagedSave
from replicated_ckpt.errors import CheckpointNotCommitted, CheckpointNotFound, ReplicatedCkptError, ShardLost

_HINT = (
    "Bring back nodes that are not reached: .metadata lies on rank 0's alone. If all are there, the save never ended."
)


def unmanaged_save(
    look: UnmanagedLook,
    asked: Newest | str,
    ours: Collection[str],
    searched: Sequence[str],
    because: ReplicatedCkptError,
) -> UnmanagedSave:
    """The stock checkpoint that is `asked` for, by its id or as "latest", where nothing of ours is it, `because`.

    An explicit id gives what there is of it, as a load may need only what is left. "latest" gives the newest one, by the
    time of `.metadata`, of which every shard is there.

    Raises:
        CheckpointAmbiguous: nodes contradict each other. CheckpointNotCommitted: there are shards and no metadata.
        ShardLost: "latest", and none is whole. `because`: there is none. LatestAmbiguous
    """
    newest = asked if isinstance(asked, Newest) else None
    wanted = asked if isinstance(asked, str) else None
    found = look.checkpoints(wanted, ours)
    if newest is not None:
        newest = newest.choose_directory(checkpoint.checkpoint_id for checkpoint in found)
        found = tuple(checkpoint for checkpoint in found if newest.fits(checkpoint.checkpoint_id))
    lost: ShardLost | None = None
    for checkpoint in found:
        if not checkpoint.nodes_with_metadata:
            continue
        save = look.examine(checkpoint).save
        if wanted is not None or not save.missing:
            return save
        owners = {shard: save.manifest.owner_of(shard) for shard in save.missing}
        lost = lost or ShardLost(save.checkpoint_id, owners, [*searched, *save.refused], is_latest=True)
    if lost is None and found and isinstance(because, CheckpointNotFound):
        raise CheckpointNotCommitted(_without_metadata(found[0], searched), _HINT)
    raise lost or because


def _without_metadata(checkpoint: UnmanagedCheckpoint, searched: Sequence[str]) -> str:
    nodes = ", ".join(holding.node_id for holding in checkpoint.holdings)
    return (
        f"Shards of {checkpoint.checkpoint_id!r} lie on node {nodes} without a manifest, and no node that was reached "
        f"has its .metadata. Searched: {'; '.join(searched)}."
    )


def unmanaged_warning(save: UnmanagedSave, because: ReplicatedCkptError | None) -> str:
    """What a load of such a checkpoint warns about. `because`: why none of ours is loaded, where "latest" was asked for."""
    newer = f" It is taken though newer ones are there: {because.message}" if isinstance(because, ShardLost) else ""
    later = ", ".join(save.written_later)
    return (
        f"{save.checkpoint_id} has no manifest: stock torch wrote it, or it is lost on every node that was reached. "
        "A shard that ends with checksums of ours is held against them; of any other only the CRC32 that torch.save left "
        "inside is checked, where it is there. "
        f"{'There are no copies' if save.copies < 2 else f'Each shard was found {save.copies} times'}. "
        + (f"Written later than .metadata, so perhaps by another save: {later}. " if later else "")
        + "`replicated-ckpt repair` makes checksums and copies of what stock torch wrote; where the manifest is lost, save "
        f"it anew.{newer}"
    )
