"""An id that names no managed checkpoint here: the error that tells what it may be; and what `latest` stands for."""

from shlex import quote

from replicated_ckpt.agent.repair.unmanaged import UnmanagedLook
from replicated_ckpt.cli.look.checkpoints import DAMAGED, list_checkpoints
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes
from replicated_ckpt.core.layout import is_checkpoint_id
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.errors import CheckpointNotFound, ManifestVersionUnknown, ReplicatedCkptError
from replicated_ckpt.stores.local.store import LocalStore


def describe_newer(checkpoint_id: str) -> str:
    """A checkpoint of which this version sees nothing but the name."""
    return f"{checkpoint_id}: only a newer version of replicated_ckpt reads it; upgrade"


def describe_absent(store: LocalStore, seen: NodesSeen, checkpoint_id: str, otherwise: str = "") -> ReplicatedCkptError:
    """What to raise for it; `otherwise` is a further next step."""
    # "Not found" would make its user think that it is gone.
    if checkpoint_id in seen.newer:
        return ManifestVersionUnknown(
            f"{checkpoint_id!r} has a format that only a newer version of replicated_ckpt reads."
        )
    look = UnmanagedLook(store, seen.own_node, seen.reached)
    if is_checkpoint_id(checkpoint_id) and look.checkpoints(checkpoint_id):
        return CheckpointNotFound(
            f"{checkpoint_id!r} is a checkpoint of stock torch, which has no manifest.",
            "It is a plain directory on each node that has files of it. Load it and save it under a new id: the new "
            "save has copies and checksums.",
        )
    listing = f"`replicated-ckpt ls --root {quote(str(store.root))}`"
    hint = f"{listing} lists the checkpoints, and the nodes that were not reached.{otherwise}"
    unreached = seen.describe_unreached()
    where = f" Not reached: {'; '.join(unreached)}." if unreached else ""
    message = f"No node that was reached holds a checkpoint {checkpoint_id!r}.{where}"
    return CheckpointNotFound(message, hint, unreached)


def find_id(store: LocalStore, asked: str, seen: NodesSeen | None = None) -> str:
    """The id that is `asked` for; of "latest" the newest checkpoint that can be loaded, as far as the nodes show.

    Raises:
        LatestAmbiguous: checkpoints lie in several directories. CheckpointNotFound: none was seen.
    """
    newest = Newest.parse(asked)
    if newest is None:
        return asked
    seen = look_at_nodes(store) if seen is None else seen
    rows = list_checkpoints(seen)
    newest = newest.choose_directory(row.checkpoint_id for row in rows)
    rows = [row for row in rows if newest.fits(row.checkpoint_id)]
    if not rows:
        raise describe_absent(store, seen, asked)
    # "latest" must be one that a load can take: a damaged one may be the newest.
    whole = (row for row in rows if not row.is_lost and row.state != DAMAGED)
    return next(whole, rows[0]).checkpoint_id
