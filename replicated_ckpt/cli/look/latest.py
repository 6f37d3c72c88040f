"""The checkpoint that "latest" names in a command: the newest of one directory of ids, as a load chooses it."""

from replicated_ckpt.cli.look.absent import describe_absent
from replicated_ckpt.cli.look.checkpoints import DAMAGED, list_checkpoints
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.stores.local.store import LocalStore


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
    whole = (row for row in rows if not row.is_lost and row.state != DAMAGED)
    return next(whole, rows[0]).checkpoint_id
