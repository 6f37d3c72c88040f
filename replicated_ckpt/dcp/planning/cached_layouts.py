"""The layout of a save, cached for the next one. A rank whose shard has the same layout sends a digest, not its
results.
"""

import copy
import hashlib
import operator
import pickle
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.errors import SaveAborted

_FIELDS: Mapping[type, int] = {
    kind: len(fields(kind)) for kind in (Metadata, TensorStorageMetadata, BytesStorageMetadata)
}


class ShardResults(list[WriteResult]):
    """DCP's results for one rank's shard. If the coordinator has them from save `same_as`, they are sent as a digest."""

    def __init__(self, results: Iterable[WriteResult] = (), digest: str = "", same_as: str = "") -> None:
        super().__init__(results)
        self._digest, self._described = digest, list(self)
        self._same_as = same_as

    @property
    def digest(self) -> str:
        """The digest of names, offsets and lengths; "" if a wrapper of the writer has changed the list meanwhile."""
        return self._digest if self == self._described else ""

    def __copy__(self) -> list[WriteResult]:
        """The results themselves: a rank that is not the coordinator could not find them by the digest."""
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[WriteResult]:
        return copy.deepcopy(list(self), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # A list that a wrapper has changed is sent whole: the digest does not describe it.
        if self._same_as and self.digest:
            return _find_results, (self._same_as, self._digest)
        return ShardResults, (list(self), self.digest)


class _LostResults(list[WriteResult]):
    """Stands for results that the coordinator does not have. Gathering must not raise: the other ranks would wait."""


def holds_paths_only(planner_data: Any) -> bool:
    """Whether planner data are those of DCP's own planner: the path of each name in the nested state."""
    return type(planner_data) is dict and all(type(path) is tuple for path in planner_data.values())


class PlannerData:
    """A copy of a planner's own data. A foreign planner's `==` may return anything, so pickles are compared."""

    def __init__(self, data: Any) -> None:
        is_paths = holds_paths_only(data)
        self._paths = dict(data) if is_paths else None
        self._pickle = b"" if is_paths else pickle.dumps(data)

    def is_same(self, data: Any) -> bool:
        if self._paths is None:
            return pickle.dumps(data) == self._pickle
        if type(data) is not dict or list(data) != list(self._paths):
            return False
        # The same objects need no comparison: that of a million paths would cost more than the cache saves.
        if all(map(operator.is_, data.values(), self._paths.values())):
            return True
        return pickle.dumps(data) == pickle.dumps(self._paths)


@dataclass(frozen=True)
class CachedLayout:
    """The coordinator's cache of a committed save. `raw`: the bytes of its `.metadata`, without those for a bucket.

    Its last `weights` bytes describe the checkpoint without its optimizer, whose entries have one of the prefixes
    `dropped`. 0: there is no optimizer, or nothing else.
    """

    save_id: str
    checkpoint_id: str
    results_by_digest: Mapping[str, Sequence[WriteResult]]
    digests: Sequence[str]
    described: Mapping[str, Any]
    planner_data: PlannerData
    places: Mapping[MetadataIndex, StorageInfo]
    shards: frozenset[str]
    raw: bytes
    weights: int = 0
    dropped: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        save_id: str,
        checkpoint_id: str,
        metadata: Metadata,
        results: Sequence[Sequence[WriteResult]],
        raw: bytes,
        weights: bytes = b"",
        dropped: tuple[str, ...] = (),
    ) -> "CachedLayout":
        digests = [_digest_in(one) for one in results]
        return cls(
            save_id,
            checkpoint_id,
            dict(zip(digests, map(list, results), strict=True)),
            digests,
            dict(metadata.state_dict_metadata),
            PlannerData(metadata.planner_data),
            dict(metadata.storage_data),
            frozenset(str(info.relative_path) for info in metadata.storage_data.values()),
            raw + weights,
            len(weights),
            dropped,
        )

    def is_of(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> bool:
        """Whether a save with this metadata and these results has the same `.metadata`."""
        return (
            _has_fields_only(metadata)
            and self.digests == [_digest_in(one) for one in results]
            and self.described == metadata.state_dict_metadata
            and self.planner_data.is_same(metadata.planner_data)
        )


def _has_fields_only(metadata: Metadata) -> bool:
    """Whether it has DCP's own fields only, which `==` compares. A planner may have added attributes."""
    return all(len(vars(one)) == _FIELDS.get(type(one)) for one in (metadata, *metadata.state_dict_metadata.values()))


# Weak: a layout lives as long as the writer that has cached it.
_by_save: "weakref.WeakValueDictionary[str, CachedLayout]" = weakref.WeakValueDictionary()


def _find_results(save_id: str, digest: str) -> list[WriteResult]:
    """Coordinator: the results of a rank that sent only their digest. They are those of the save `save_id`."""
    kept = _by_save.get(save_id)
    # The coordinator was replaced, or its cache dropped: `find_layout` then raises for all ranks together.
    if kept is None or digest not in kept.results_by_digest:
        return _LostResults()
    return ShardResults(kept.results_by_digest[digest], digest)


class CachedLayouts:
    """One writer's cache from save to save.

    Each rank keeps digests of its results, and the coordinator keeps the layout that belongs to them. A cached layout
    is used only after a comparison. The decision names the save that the coordinator has cached, and each rank compares
    its new results with its digest of that save. The coordinator then compares the digests of all ranks, and the new
    metadata.
    """

    def __init__(self) -> None:
        self._digest_by_save: dict[str, str] = {}
        self._kept: CachedLayout | None = None

    @property
    def save_id(self) -> str:
        """Coordinator: the save that ranks may refer to; "" for none."""
        return "" if self._kept is None else self._kept.save_id

    def refer(self, results: list[WriteResult], save_id: str, known: str) -> ShardResults:
        """This rank's results of a save, in the form that is sent to the coordinator. `known`: the save in its cache."""
        digest = _digest_of(results)
        is_same = self._digest_by_save.get(known) == digest
        # Keeps two saves: if this one fails, the coordinator refers to the previous one.
        self._digest_by_save = {
            one: kept for one, kept in (*self._digest_by_save.items(), (save_id, digest)) if one in (known, save_id)
        }
        return ShardResults(results, digest, known if is_same else "")

    def find_layout(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> CachedLayout | None:
        """Coordinator: the cached layout, if a save with this metadata and these results has the same.

        Raises:
            SaveAborted: a rank refers to results that are not in the cache. The next save sends them whole.
        """
        if any(isinstance(one, _LostResults) for one in results):
            self._kept = None
            raise SaveAborted(
                "A rank refers to the layout of an earlier save, which the coordinator does not have.",
                "Save again: all ranks send their layouts then.",
            )
        kept = self._kept
        return kept if kept is not None and kept.is_of(metadata, results) else None

    def keep(self, layout: CachedLayout) -> None:
        """Coordinator: caches the layout of a decided save, unless a wrapper of the writer has changed its results."""
        self._kept = layout if all(layout.digests) else None
        _by_save[layout.save_id] = layout


def _digest_in(results: object) -> str:
    return results.digest if isinstance(results, ShardResults) else ""


def _digest_of(results: Sequence[WriteResult]) -> str:
    digest = hashlib.sha256()
    for result in results:
        index, info = result.index, result.storage_data
        offset = None if index.offset is None else tuple(index.offset)
        place = (info.relative_path, info.offset, info.length, getattr(info, "transform_descriptors", None))
        digest.update(repr((index.fqn, offset, index.index, result.size_in_bytes, place)).encode())
    return digest.hexdigest()
