"""Builds DCP's Metadata from the tree of a `.metadata`, and checks the types on which DCP and the reader rely."""

import copyreg
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import MISSING
from dataclasses import fields as fields_of
from pathlib import PosixPath, PurePosixPath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.core.chunk import is_contiguous
from replicated_ckpt.core.layout import is_shard_path
from replicated_ckpt.core.pickles.tree import DEPTH_MAX, LEAVES, Fields, Made, Named, Pairs, PickleUnsafe, check_bounds
from replicated_ckpt.dcp.objects.values import Key, UnknownName, Values, key_of
from replicated_ckpt.dcp.runtime.torch_private import (
    MemoryFormat,
    OldMemoryFormat,
    OldTensorProperties,
    StorageInfo,
    StoragePrefix,
    layout_of,
)

COMMON_FIELDS = 5
"""The fields that every supported torch reads and writes: dtype, layout, requires_grad, memory format, pin_memory. torch up
to 2.13 refuses a state with more. Source: torch 2.7 to 2.15, `TensorProperties.__getstate__`."""


def known_fields(kind: type) -> int:
    """The number of fields that this torch writes and reads for a class of properties."""
    return len(kind().__getstate__())


def reduction_for_all(metadata: Metadata) -> Callable[[TensorProperties], Any]:
    """A function that pickles the properties in `metadata`. It omits fields that older versions lack, if they are empty."""
    if known_fields(TensorProperties) == COMMON_FIELDS:
        return _reduce_whole
    can_cut: dict[int, bool] = {}
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            key = id(entry.properties)
            # Several tensors may share one object, so fields are cut only if no tensor loses any.
            can_cut[key] = can_cut.get(key, True) and _has_only_common(entry)

    def reduce(properties: TensorProperties) -> Any:
        if not can_cut.get(id(properties), False):
            return _reduce_whole(properties)
        return copyreg.__newobj__, (TensorProperties,), _state_of(properties)[:COMMON_FIELDS]  # type: ignore[attr-defined]

    return reduce


def _reduce_whole(properties: TensorProperties) -> Any:
    return properties.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _state_of(properties: Any) -> Sequence[Any]:
    state: Sequence[Any] = properties.__getstate__()
    return state


def _has_only_common(entry: TensorStorageMetadata) -> bool:
    """Whether the fields beyond the common ones are empty, or have only the strides of a contiguous tensor or chunk."""
    strides, *others = _state_of(entry.properties)[COMMON_FIELDS:]
    if any(other is not None for other in others):
        return False
    if strides is None or is_contiguous(entry.size, strides):
        return True
    return any(is_contiguous(chunk.sizes, strides) for chunk in entry.chunks)


_DCP, _FILESYSTEM, _OLD = dcp_metadata.__name__, StorageInfo.__module__, OldTensorProperties.__module__
_KNOWN: dict[Key, Any] = {
    **{
        (_DCP, kind.__name__): kind
        for kind in (
            *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex),
            *(StorageMeta, TensorProperties, TensorStorageMetadata, MemoryFormat),
        )
    },
    (_FILESYSTEM, "_StorageInfo"): StorageInfo,
    (_FILESYSTEM, "_StoragePrefix"): StoragePrefix,
    # Checkpoints of older torch versions name other classes with the same fields.
    (_OLD, "TensorProperties"): OldTensorProperties,
    (_OLD, "MEM_FORMAT_ENCODING"): OldMemoryFormat,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): layout_of,
    ("builtins", "complex"): complex,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, kind.__name__): kind for module in ("pathlib", "pathlib._local") for kind in (PosixPath, PurePosixPath)
    },
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
_FILLED_AT_ONCE = (set, frozenset, OrderedDict)
_SIZE, _TENSOR, _CHUNK = ("torch", "Size"), (_DCP, "TensorStorageMetadata"), (_DCP, "ChunkStorageMetadata")
_INDEX, _INFO = (_DCP, "MetadataIndex"), (_FILESYSTEM, "_StorageInfo")
_METADATA_FIELDS = frozenset(one.name for one in fields_of(Metadata))
"""This torch's fields. Any other field comes from a newer torch, and is left out if its classes are unknown here."""
_INT_MAX = (1 << 63) - 1  # torch.Size takes no larger number
_NAME_CHARACTERS = 200
COLLISIONS_MAX = 64  # more offsets with one hash make a dictionary slow: a denial of service
DIMENSIONS_MAX = 64
_LEAN_WEIGHT = 64
"""Up to this weight, a part that this package does not use costs no steps."""
_STEPS_MIN = 1 << 22
Instance = TypeVar("Instance")


def build_metadata(tree: Any, size_bytes: int, registered: Mapping[Key, type]) -> Metadata:
    """The metadata in the tree of a pickle of this size.

    Raises:
        PickleUnsafe: it is not metadata, or names a class that DCP metadata does not consist of.
    """
    return _Builder(size_bytes, registered).metadata(tree)


def _complete(found: Any) -> None:
    """Adds the fields that an older torch did not have to a StorageMeta: code that prints or writes it needs all."""
    if type(found) is not StorageMeta:
        return
    for one in fields_of(found):
        if not hasattr(found, one.name):
            if one.default_factory is MISSING:
                raise PickleUnsafe(f"has a StorageMeta without {one.name!r}")
            setattr(found, one.name, one.default_factory())


class _Builder(Values):
    """Makes one Metadata.

    Parts of which there may be millions are made once each, without a call of their class. Each further visit of a node
    costs steps, of which there are `_STEPS_MIN` and one for each byte of the pickle.
    """

    def __init__(self, size_bytes: int, registered: Mapping[Key, type]) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._steps_left = _STEPS_MIN + size_bytes
        self._registered = registered
        self._size_by_hash: dict[int, torch.Size] = {}
        self._collisions = 0
        self._is_shard: dict[str, bool] = {}
        self._properties_by_identity: dict[tuple[Any, ...], Any] = {}
        self._known_fields: dict[Any, int] = {
            kind: known_fields(kind) for kind in (TensorProperties, OldTensorProperties)
        }

    def find(self, key: Key) -> Any:
        found = self._registered.get(key, _KNOWN.get(key))
        if found is None:
            raise UnknownName(key)
        return found

    def check_keys(self, keys: Sequence[Any]) -> None:
        """Texts hash with this process's random seed. Other keys may have been chosen to hash alike, so they cost steps."""
        for number, key in enumerate(keys):
            if type(key) is not str:
                self._spend(number)

    def resolve_name(self, node: Named) -> torch.dtype:
        found = self.find(key_of(node))
        if not isinstance(found, torch.dtype):
            raise PickleUnsafe(f"holds {_describe(node)} where a value belongs")
        return found

    def make(self, node: Made) -> Any:
        # These classes hash the elements of a list before any other check.
        if self.find(key_of(node.called)) in _FILLED_AT_ONCE:
            for items in node.arguments:
                self.check_keys(items if type(items) is list else ())
        return super().make(node)

    def _spend(self, steps: int) -> None:
        # A small pickle can expand to a huge value by repeating parts, so its size bounds the work.
        self._steps_left -= steps
        if self._steps_left < 0:
            raise PickleUnsafe("repeats its parts beyond the limit, or has keys that would take too long to hash")

    def _anything(self, node: Any) -> Any:
        """The value of a node that this package does not use."""
        if type(node) not in LEAVES and id(node) not in self._known:
            self._spend(max(0, check_bounds(node, self._size_bytes) - _LEAN_WEIGHT))
        return self.of(node)

    # The whole ----------------------------------------------------------------------------------------------------

    def metadata(self, tree: Any) -> Metadata:
        fields = dict(self._attributes(tree, (_DCP, "Metadata")))
        described, places = (fields.pop(name, None) for name in ("state_dict_metadata", "storage_data"))
        if type(described) is not Pairs or type(places) is not Pairs:
            raise PickleUnsafe("has no state dict, or no places of its items")
        attributes: dict[str, Any] = {}
        for name, node in fields.items():
            # A newer torch may add fields with classes that this one cannot name.
            with suppress(UnknownName) if name not in _METADATA_FIELDS else nullcontext():
                attributes[name] = self._anything(node)
        _complete(attributes.get("storage_meta"))
        self._check_positions(attributes.get("planner_data"))
        attributes["state_dict_metadata"] = {name: self._entry(name, node) for name, node in _pairs(described)}
        attributes["storage_data"] = {self._index(key): self._info(info) for key, info in _pairs(places)}
        return _instance(Metadata, attributes)

    def _entry(self, name: Any, node: Any) -> Any:
        if type(name) is not str:
            raise PickleUnsafe("has an entry of the state dict without a name")
        if type(node) is Made and node.called.name == _TENSOR[1]:
            return self._tensor(node)
        if type(found := self._anything(node)) is BytesStorageMetadata:
            return found
        raise PickleUnsafe(f"describes {name[:_NAME_CHARACTERS]!r} as neither tensor nor object")

    def _check_positions(self, planner_data: Any) -> None:
        """Bounds the depth of paths and the positions in them: a planner makes a list for the largest position."""
        last_by_list: dict[tuple[Any, ...], int] = {}
        for path in planner_data.values() if type(planner_data) is dict else ():
            if type(path) is tuple and len(path) > DEPTH_MAX:
                raise PickleUnsafe(f"has a path of more than {DEPTH_MAX} parts")
            for depth, part in enumerate(path if type(path) is tuple else ()):
                # The list is as long as the largest position: one path could ask for terabytes.
                if type(part) is int and part > (last := last_by_list.get(path[:depth], -1)):
                    self._spend(part - last)
                    last_by_list[path[:depth]] = part

    # Parts of which there are millions ----------------------------------------------------------------------------

    def _attributes(self, node: Any, key: Key) -> Mapping[str, Any]:
        """The attribute nodes of a new instance of a class, by name."""
        if type(node) is not Made or node.called.name != key[1] or node.called.module != key[0]:
            if type(node) is Made:
                # An unknown class is reported as such, with the hint to register it.
                self.find(key_of(node.called))
            raise PickleUnsafe(f"has {_describe(node)} where a {key[1]} belongs")
        state = node.state
        if type(state) is Pairs and all(type(name) is str for name in state[::2]):
            self._spend(len(state))
            state = Fields(zip(state[::2], state[1::2], strict=True))
        # Any other way of making it could call a constructor, or share the state with another instance.
        if type(state) is not Fields or not node.is_new or node.arguments or node.contents is not None:
            raise PickleUnsafe(f"makes a {key[1]} in a way that picklers do not")
        return state

    def _make(
        self, node: Made, kind: type[Instance], fields: Mapping[str, Any], attributes: dict[str, Any]
    ) -> Instance:
        """The instance of a node, with these attributes and any that a newer torch has added."""
        if len(fields) > len(attributes):
            others = {name: self._anything(value) for name, value in fields.items() if name not in attributes}
            attributes = others | attributes
        instance = node.value = _instance(kind, attributes)
        return instance

    def _tensor(self, node: Any) -> TensorStorageMetadata:
        if type(node.value) is TensorStorageMetadata:
            self._spend(len(node.value.chunks))  # readers walk through the chunks once more
            return node.value
        fields = self._attributes(node, _TENSOR)
        size, nodes = self._size(fields.get("size")), fields.get("chunks")
        if type(nodes) is not list:
            raise PickleUnsafe(f"has {_describe(nodes)} where a list of chunks belongs")
        self._spend(len(nodes))
        chunks, dimensions = [self._chunk(chunk) for chunk in nodes], len(size)
        # A reader computes offsets from both: unequal lengths would cut one of them off silently.
        for chunk in chunks:
            if len(chunk.offsets) != dimensions:
                raise PickleUnsafe("has a chunk of other dimensions than its tensor")
        properties = self._properties(fields.get("properties"))
        attributes = {"properties": properties, "size": size, "chunks": chunks}
        return self._make(node, TensorStorageMetadata, fields, attributes)

    def _chunk(self, node: Any) -> ChunkStorageMetadata:
        if type(node) is Made and type(node.value) is ChunkStorageMetadata:
            return node.value
        fields = self._attributes(node, _CHUNK)
        offsets, sizes = self._size(fields.get("offsets")), self._size(fields.get("sizes"))
        if len(offsets) != len(sizes):
            raise PickleUnsafe("has a chunk with more offsets than sizes, or fewer")
        return self._make(node, ChunkStorageMetadata, fields, {"offsets": offsets, "sizes": sizes})

    def _index(self, node: Any) -> MetadataIndex:
        if type(node) is Made and type(node.value) is MetadataIndex:
            return node.value
        fields = self._attributes(node, _INDEX)
        name, offset, number = fields.get("fqn"), fields.get("offset"), fields.get("index")
        if type(name) is not str or not (number is None or type(number) is int):
            raise PickleUnsafe("has the place of an item without a name")
        attributes: dict[str, Any] = {"fqn": name}
        if "index" in fields:
            attributes["index"] = number
        if "offset" in fields:
            attributes["offset"] = None if offset is None else self._size(offset)
        return self._make(node, MetadataIndex, fields, attributes)

    def _info(self, node: Any) -> StorageInfo:
        if type(node) is Made and type(node.value) is StorageInfo:
            return node.value
        fields = self._attributes(node, _INFO)
        path, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        # A negative offset or length would read outside of the item, or make a buffer of any size.
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0 or type(path) is not str:
            raise PickleUnsafe("has an item that lies in no shard")
        found = self._is_shard.get(path)
        # Cached by path: there are few shards, and millions of items.
        if found is None:
            found = self._is_shard[path] = is_shard_path(path)
        # A path could lead out of the checkpoint's directory.
        if not found:
            raise PickleUnsafe(f"has an item in {path[:_NAME_CHARACTERS]!r}, which is not a shard")
        return self._make(node, StorageInfo, fields, {"relative_path": path, "offset": offset, "length": length})

    def _size(self, node: Any) -> torch.Size:
        """A size, or a plain tuple in its place, as in chunks of Megatron-FSDP."""
        if type(node) is tuple:
            return self._size_of(node)
        if type(node) is not Made:
            raise PickleUnsafe(f"has {_describe(node)} where a size belongs")
        if type(node.value) is torch.Size:
            return node.value
        numbers = node.arguments[0] if len(node.arguments) == 1 else None
        is_call = not node.is_new and node.state is None and node.contents is None
        if key_of(node.called) != _SIZE or not is_call or type(numbers) is not tuple:
            raise PickleUnsafe(f"has {_describe(node)} where a size belongs")
        size = node.value = self._size_of(numbers)
        return size

    def _size_of(self, numbers: tuple[Any, ...]) -> torch.Size:
        """The size with these numbers. Bounds how many sizes hash alike, so that no dictionary of them gets slow."""
        if len(numbers) > DIMENSIONS_MAX or not all(type(one) is int and 0 <= one <= _INT_MAX for one in numbers):
            raise PickleUnsafe("has a size that is not made of numbers")
        size = torch.Size(numbers)
        if self._size_by_hash.setdefault(hash(size), size) != size:
            # Small integers hash to themselves, so an attacker can choose tuples that collide.
            self._collisions += 1
            if self._collisions > COLLISIONS_MAX:
                raise PickleUnsafe("has too many sizes with equal hashes")
        return size

    def _properties(self, node: Any) -> Any:
        """Properties of a tensor. Fields that only a newer torch has are left out: no load needs them."""
        kind = self.find(key_of(node.called)) if type(node) is Made else None
        known = self._known_fields.get(kind)
        if known is None or type(node.state) is not tuple:
            raise PickleUnsafe(f"has {_describe(node)} where the properties of a tensor belong")
        # torch up to 2.13 refuses the sixth field that 2.15 writes.
        if len(node.state) > known:
            node.state = node.state[:known]
        if id(node) in self._known:
            return self._known[id(node)]
        key = _identity(node)
        like = self._properties_by_identity.get(key)
        if like is not None:
            # An object of its own: a change of one tensor's properties must not reach another's.
            found = self._known[id(node)] = _instance(type(like), vars(like))
            return found
        found = self._properties_by_identity[key] = self._anything(node)
        if type(vars(found).get("dtype")) is not torch.dtype:
            raise PickleUnsafe("has properties of a tensor without its type")
        return found


def _identity(node: Made) -> tuple[Any, ...]:
    """Equal for instances made in the same way from the same parts, as long as the tree exists."""
    return node.is_new, *map(id, (node.called, node.arguments, node.contents, *node.state))


def _describe(node: Any) -> str:
    """The name of a node's class or type, for an error."""
    if type(node) is Named:
        return node.path[:_NAME_CHARACTERS]
    return _describe(node.called) if type(node) is Made else type(node).__name__


def _instance(kind: type[Instance], attributes: Mapping[str, Any]) -> Instance:
    # Not by its constructor: that costs a call for each of millions.
    instance = object.__new__(kind)
    instance.__dict__.update(attributes)
    return instance


def _pairs(nodes: Pairs) -> Iterator[tuple[Any, Any]]:
    return zip(nodes[::2], nodes[1::2], strict=True)
