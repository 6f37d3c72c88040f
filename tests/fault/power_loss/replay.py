"""Every state that a power loss could leave of a recorded log.

The model, which allows more than any one file system does:

- Bytes that were written to a file since its last fsync may all be there, or be missing in one of these ways: the file
  is as it was at that fsync; it is empty; it has the new size, with zeros; it has a first part of the bytes, with or
  without zeros up to the full size. An fsync makes the bytes of that file durable, but not its name.
- Each change of names (create, mkdir, link, unlink, rmdir, rename, exchange) may be lost or kept independently of the
  others, until its directory is fsynced; a change in two directories, until both are. Each change is atomic, renames and
  exchanges included. Changes of the same name keep their order: a later one is kept only with the earlier ones.
- Durable bytes and names stay.

Sources: POSIX.1-2017, `fsync` and `rename`, which promise no more than this (a rename is atomic to other processes; Linux
file systems keep it atomic across a crash). Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014: losses
and reorderings on ext2/3/4, btrfs, xfs and reiserfs, for example names of different directories that were persisted
out of order. Linux `Documentation/filesystems/ext4`: delayed allocation leaves files of zero length, mode
`data=writeback` leaves sizes without the bytes. fsync(2): an fsync of a file "does not necessarily ensure that the entry
in the directory containing the file has also reached disk". xfs: zeros or missing bytes after a crash, in the xfs FAQ.
Left out: a disk that lies about an fsync, garbage in place of zeros (it fails a checksum as zeros do), torn names.

Bounds: with up to EXHAUSTIVE pending changes of names, every legal subset is tried. With more: none, all, each one lost
alone (with what depends on it), each one kept alone (with what it depends on), and SAMPLES random subsets. Every subset
is combined with the damages of the files that have bytes at risk: all combinations for up to two files, and otherwise
one file at a time, and all files alike.
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tests.fault.power_loss.operations import Disk, Log, Mark, Names, Sync, Tree, Truncate, Write, changed

EXHAUSTIVE = 10
SAMPLES = 100

Promises = Mapping[str, tuple[object, ...]]
"""The promises at the moment of the power loss: the allowed values by subject."""


@dataclass(frozen=True)
class CrashState:
    """One state: the power failed after the first `position` operations of the log, and `lost` describes the losses."""

    position: int
    lost: str
    tree: Tree
    promises: Promises

    @cached_property
    def key(self) -> object:
        """Equal for states that cannot be distinguished."""
        return frozenset(self.tree.items()), frozenset(self.promises.items())

    def __str__(self) -> str:
        return f"after operation {self.position}, {self.lost or 'nothing lost'}"


class _Cache:
    """The durable disk and the operations at risk, while the log is replayed."""

    def __init__(self, initial: Disk) -> None:
        self.durable = initial.copy()
        self.pending: list[Names] = []
        self._awaiting: list[set[int]] = []
        self.dirty: dict[int, list[Write | Truncate]] = {}

    def take(self, operation: Names | Write | Truncate | Sync) -> None:
        if isinstance(operation, Names):
            self.durable.make_inodes(operation)
            self.pending.append(operation)
            self._awaiting.append(set(operation.directories))
        elif isinstance(operation, Sync):
            self._sync(operation.inode)
        else:
            self.dirty.setdefault(operation.inode, []).append(operation)

    def _sync(self, inode: int) -> None:
        for operation in self.dirty.pop(inode, []):
            self.durable.apply(operation)
        for awaiting in self._awaiting:
            awaiting.discard(inode)
        needed = needed_by(self.pending)
        settled = {index for index, awaiting in enumerate(self._awaiting) if not awaiting}
        for index in sorted(settled, reverse=True):
            settled |= needed[index]
        for index in sorted(settled):
            self.durable.apply(self.pending[index])
        left = [index for index in range(len(self.pending)) if index not in settled]
        self.pending = [self.pending[index] for index in left]
        self._awaiting = [self._awaiting[index] for index in left]


def needed_by(pending: list[Names]) -> list[frozenset[int]]:
    """For each change of names, the earlier changes that it requires: those of the same names, and what they require."""
    latest: dict[tuple[int, str], int] = {}
    needed: list[frozenset[int]] = []
    for index, operation in enumerate(pending):
        direct = {latest[entry] for entry in operation.entries if entry in latest}
        needed.append(frozenset(direct.union(*(needed[other] for other in direct))))
        latest.update(dict.fromkeys(operation.entries, index))
    return needed


def kept_subsets(pending: list[Names], seed: int) -> Iterator[frozenset[int]]:
    """The sets of pending changes that may survive together: all of them, or the sample that the module describes."""
    needed = needed_by(pending)
    everything = frozenset(range(len(pending)))
    if len(pending) <= EXHAUSTIVE:
        yield from _closed_subsets(needed, 0, frozenset())
        return
    yield everything
    yield frozenset()
    for index in everything:
        yield frozenset(other for other in everything if other != index and index not in needed[other])
        yield needed[index] | {index}
    rng = random.Random(seed)
    for _ in range(SAMPLES):
        share = rng.random()
        drawn = {index for index in everything if rng.random() < share}
        yield frozenset(index for index in drawn if needed[index] <= drawn)


def _closed_subsets(needed: list[frozenset[int]], index: int, kept: frozenset[int]) -> Iterator[frozenset[int]]:
    if index == len(needed):
        yield kept
        return
    if needed[index] <= kept:
        yield from _closed_subsets(needed, index + 1, kept | {index})
    yield from _closed_subsets(needed, index + 1, kept)


def surviving_contents(durable: bytes, written: list[Write | Truncate]) -> dict[str, bytes]:
    """The possible contents of a file whose bytes were not fsynced, by damage. "" is undamaged."""
    whole = durable
    for operation in written:
        whole = changed(whole, operation)
    first = next((at for at, (old, new) in enumerate(zip(durable, whole, strict=False)) if old != new), len(durable))
    middle = (min(first, len(whole)) + len(whole)) // 2
    return {
        "": whole,
        "as before": durable,
        "empty": b"",
        "zeros": whole[:first].ljust(len(whole), b"\0"),
        "half": whole[:middle],
        "half and zeros": whole[:middle].ljust(len(whole), b"\0"),
    }


def _damages(dirty: Mapping[int, Mapping[str, bytes]]) -> Iterator[dict[int, str]]:
    """The combinations of damages to several files that are tried."""
    if len(dirty) <= 2:
        for combination in itertools.product(*dirty.values()):
            yield dict(zip(dirty, combination, strict=True))
        return
    for how in next(iter(dirty.values())):
        yield dict.fromkeys(dirty, how)
        for inode in dirty:
            yield {**dict.fromkeys(dirty, ""), inode: how}


def crash_states(log: Log, seed: int = 0, start: int = 0) -> Iterator[CrashState]:
    """The distinct states after a power loss at any moment from operation `start` on, each with the promises of that
    moment.
    """
    cache = _Cache(log.initial)
    promises: dict[str, tuple[object, ...]] = {}
    seen: set[object] = set()
    first = next((at for at, operation in enumerate(log.operations) if not isinstance(operation, Mark)), 0)
    for position, operation in enumerate([None, *log.operations]):
        if isinstance(operation, Mark):
            promises = {**promises, operation.subject: operation.allowed}
        elif operation is not None:
            cache.take(operation)
        if position < max(start, first):
            continue
        for lost, tree in _surviving(cache, seed + position):
            state = CrashState(position, lost, tree, promises)
            if state.key not in seen:
                seen.add(state.key)
                yield state


def _surviving(cache: _Cache, seed: int) -> Iterator[tuple[str, Tree]]:
    """The possible states at one moment, each with a description of the losses."""
    contents = {
        inode: surviving_contents(cache.durable.contents[inode], written) for inode, written in cache.dirty.items()
    }
    for kept in kept_subsets(cache.pending, seed):
        named = Disk({inode: dict(names) for inode, names in cache.durable.names.items()}, cache.durable.contents)
        for index in sorted(kept):
            named.apply(cache.pending[index])
        reachable = named.reachable()
        at_risk = {inode: found for inode, found in contents.items() if inode in reachable}
        lost = [str(operation) for index, operation in enumerate(cache.pending) if index not in kept]
        for damage in _damages(at_risk):
            changes = {inode: contents[inode][how] for inode, how in damage.items()}
            tree = Disk(named.names, {**named.contents, **changes}).tree()
            harm = [f"file {inode} {how}" for inode, how in damage.items() if how]
            yield "; ".join([*lost, *harm]), tree
