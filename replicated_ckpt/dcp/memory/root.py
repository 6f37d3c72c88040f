"""A node's memory tier: its directory on a file system in memory, and the limit of its size."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.agreement.decision import SaveDecision, SavePost, tensor_bytes
from replicated_ckpt.dcp.agreement.node_post import find_seen_lineage
from replicated_ckpt.dcp.staging.segment import takeable_bytes
from replicated_ckpt.environment import make_absolute
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.room import find_free_bytes
from replicated_ckpt.stores.local.memory_tier import find_other_disk, note_memory_tier
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import describe_bytes, one_line

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - each user has a directory of its own there, which is checked
_OF_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_BYTES = 512
_DIGITS = 16


def find_memory_root(root: str | os.PathLike[str], memory: object) -> Path:
    """The root of a store's memory tier: the directory that `memory` names; for True, one derived from the store's path.

    Raises:
        ConfigInvalid: `memory` is invalid, or names a directory that is not in memory or is the tier of another store.
        StoreDenied: another user may have written the tier's own records.
    """
    if memory is True:
        # A digest of the path: two roots of one user never share a tier, and no separator has to be escaped.
        digest = hashlib.sha256(os.fsencode(make_absolute(root))).hexdigest()
        found = _own_directory() / digest[:_DIGITS]
    elif isinstance(memory, str | os.PathLike) and Path(memory).is_absolute():
        found = Path(make_absolute(memory))
    else:
        raise ConfigInvalid(f"memory must be True, or the absolute path of a directory in memory, not {memory!r}.")
    if found == Path(make_absolute(root)):
        raise ConfigInvalid(
            f"memory and root are the same directory: {found}.", "Give the memory tier its own directory."
        )
    try:
        kind = _find_file_system(found)
        _check_is_free(LocalStore(found), LocalStore(root))
    except OSError as exc:
        raise ConfigInvalid(
            f"memory={str(found)!r} cannot be read: {exc.strerror} ({exc.filename}).",
            "Name a directory of this user in a tmpfs; `ls -ld` shows the owner.",
        ) from exc
    # On a disk the tier would write each checkpoint twice, and be no faster.
    if kind not in _OF_MEMORY:
        raise ConfigInvalid(
            f"memory={str(found)!r} lies on a file system of type {kind or 'unknown'}, which is not memory.",
            f"Name a directory in a tmpfs, such as {SHARED_MEMORY}, which memory=True uses.",
        )
    return found


def claim_memory_root(tier: LocalStore, disk: LocalStore) -> None:
    """Records in both stores that `tier` is the memory tier of `disk`.

    Raises:
        ConfigInvalid: it has become another store's tier. StoreError: it cannot be read.
    """
    with translate_errors(str(tier.root), "look at", "memory tier"):
        _check_is_free(tier, disk)
    try:
        note_memory_tier(disk, tier.root)
    except ReplicatedCkptError as exc:
        log.warning("`ls` of the disk's root will not show the memory tier: %s", one_line(exc))


def _check_is_free(tier: LocalStore, disk: LocalStore) -> None:
    other = find_other_disk(tier, disk)
    if other is not None:
        raise ConfigInvalid(
            f"memory={str(tier.root)!r} is the memory tier of another store, at {other}. Each would load and remove "
            "the other's checkpoints.",
            "Give each root its own directory. If that run is over, remove its tier first: `rm -r "
            f"{quote(str(tier.root))}`.",
        )


def _own_directory() -> Path:
    """This user's part of shared memory. Its mode keeps others from writing there whatever the umask is."""
    own = SHARED_MEMORY / f"replicated_ckpt-{os.geteuid()}"
    with contextlib.suppress(OSError):  # making the tier in it reports the same error
        own.mkdir(mode=0o755)
    return own


def measure_memory(root: Path) -> int:
    """Bytes that the tier may have in all: its present size, and the free memory of its file system, the machine and
    cgroups.

    Raises:
        OSError: they cannot be read.
    """
    return measure_used(root) + min(find_free_bytes(root), takeable_bytes())


def measure_used(root: Path) -> int:
    """Bytes of memory that a tier's files take."""
    used, seen = 0, set()
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - at each save
            except FileNotFoundError:  # an agent has just removed it
                continue
            # A shard of two versions is one file with two names (hard links).
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                # Blocks, not sizes: a sparse or cut file takes less memory than it is long.
                used += status.st_blocks * _BLOCK_BYTES
    return used


def _find_file_system(path: Path) -> str:
    """The type of the file system under a path, or under its nearest existing parent; empty: the mounts do not list it."""
    place = Path(os.path.realpath(path))
    # The tier's own directory is made later.
    while not is_there(place):
        place = place.parent
    device = place.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    for line in _MOUNTS.read_bytes().split(b"\n"):  # a path may have any bytes except blanks and line feeds
        mount, _, described = line.partition(b" - ")
        if number in mount.split(b" ")[2:3]:
            return described.split()[0].decode()
    return ""


_SHARD_BYTES = 1 << 20
"""Allowance for each shard beyond its tensors: containers, small objects, metadata."""
_TOLD_AGAIN = 1.1
"""A need that has grown by this factor is logged again."""


class MemoryTierShort(ReplicatedCkptError):
    """The memory tier of a node would need more memory than the node has for it; nothing was written."""

    default_hint = (
        "Give the tier more memory (`--shm-size` of a container, `mount -o remount,size=...`, a higher memory "
        "limit). Or save less per node, remove other runs' checkpoints from the tier, or omit memory=. Docker's "
        "/dev/shm has 64 MB by default."
    )


class MemoryLimit:
    """The limit of one writer's tier. `generations`: how many checkpoints are in it at once, with the one being written."""

    def __init__(self, store: LocalStore, generations: int) -> None:
        self._store, self._root, self._generations = store, store.root, generations
        self._told_bytes = 0.0

    def measure(self, checkpoint_id: str | None) -> int:
        """Bytes that the checkpoints of this run may take on this node. Raises StoreError."""
        with translate_errors(str(self._root), "measure", "memory tier"):
            return measure_memory(self._root) - self._measure_others(checkpoint_id)

    def _measure_others(self, checkpoint_id: str | None) -> int:
        """Bytes of checkpoints that this run's retention does not remove: other lineages, other directories of ids."""
        scope = scope_of(checkpoint_id or "")
        seen = find_seen_lineage(self._store, scope)
        if seen is None:  # the first save continues the run that it finds: nothing is foreign
            return 0
        others = [
            name
            for name, manifest in self._store.catalog.committed()
            if manifest.lineage != seen[0] or scope_of(name) != scope
        ]
        return sum(measure_used(self._root / name) for name in others)

    def check_limit(self, decision: SaveDecision, posts: Sequence[SavePost], plans: Sequence[SavePlan]) -> None:
        """Coordinator: checks that each node has room for the save, and logs the need if it has grown.

        Raises:
            MemoryTierShort: a node has too little room. Nothing was opened.
        """
        need = {node: self._generations * size for node, size in bytes_by_node(decision, plans).items()}
        room = {post.node.node_id: post.memory_bytes for post in posts if post.memory_bytes is not None}
        short = [
            f"node {node} may take {describe_bytes(room[node])}, but needs {self._describe(size)}"
            for node, size in need.items()
            # A node without a figure has its store on a disk, or runs an older release: its write fails if it is full.
            if size > room.get(node, size)
        ]
        if short:
            raise MemoryTierShort(f"The memory tier at {self._root} does not fit: {'; '.join(short)}.")
        most = max(need.values(), default=0)
        # Once per growth: a line at every save would drown the log.
        if most > _TOLD_AGAIN * self._told_bytes:
            self._told_bytes = most
            log.info("memory tier at %s: a node takes up to %s", self._root, self._describe(most))

    def _describe(self, size: int) -> str:
        one = describe_bytes(size // self._generations)
        return f"{describe_bytes(size)}: {self._generations} generations of {one}, own shards and other nodes' copies"


def bytes_by_node(decision: SaveDecision, plans: Sequence[SavePlan]) -> Mapping[str, int]:
    """Bytes that one save of these plans adds to each node: its own shards, and copies of others'. Empty: unknown."""
    sizes = [tensor_bytes(plan) for plan in plans]
    found = {node.node_id: 0 for node in decision.nodes}
    for rank, size in enumerate(sizes):
        # Plan caching left this rank's plan out: a partial sum would let a save begin that does not fit.
        if size is None:
            return {}
        owner = decision.node_of(rank).node_id
        for node in (owner, *decision.buddies_of(owner)):
            found[node] += size + _SHARD_BYTES
    return found
