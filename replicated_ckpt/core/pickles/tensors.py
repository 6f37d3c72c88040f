"""The layout of a tensor's elements in its storage, from the tree of its `torch.save` pickle.

Source: torch._utils (torch 2.7 to 2.15): a tensor is pickled as a call that rebuilds it of a storage, which is a persistent
id, and the bytes of the storage are a record beside the pickle.
"""

from dataclasses import dataclass
from typing import Any

from replicated_ckpt.core.chunk import is_contiguous
from replicated_ckpt.core.pickles.tree import Made, Named, PickleUnsafe, Stored

_INT_MAX = (1 << 63) - 1
_DIMENSIONS_MAX = 64


@dataclass(frozen=True)
class StorageOutline:
    """A storage: its record is `data/<key>`; `kind` is the class name, from which the dtype follows."""

    key: str
    kind: str
    elements: int


@dataclass(frozen=True)
class TensorOutline:
    """A plain strided CPU tensor. `dtype`: torch's name, if the storage has none."""

    storage: StorageOutline
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str | None

    def is_row_by_row(self) -> bool:
        """Whether the elements begin at the storage's start, and are contiguous in row-major order."""
        return self.offset == 0 and is_contiguous(self.shape, self.stride)


def storage_of(node: Any) -> StorageOutline:
    """The storage of a persistent id.

    Raises:
        PickleUnsafe: the id is no storage.
    """
    identity = node.identity if type(node) is Stored else None
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise PickleUnsafe("has a persistent id that is no storage")
    _, kind, key, _, elements = identity
    if type(kind) is not Named or type(key) is not str or type(elements) is not int or not 0 <= elements <= _INT_MAX:
        raise PickleUnsafe("has a persistent id that is no storage")
    return StorageOutline(key, kind.name, elements)


def tensor_of(node: Any) -> TensorOutline | None:
    """The tensor that a call rebuilds. None: it is another call, or a tensor with state of its own."""
    # With a state or contents it is more than its elements: the slow path reads it as an object.
    if type(node) is not Made or node.is_new or node.state is not None or node.contents is not None:
        return None
    kind, arguments = (node.called.module, node.called.name), node.arguments
    if kind == ("torch._utils", "_rebuild_tensor_v2") and len(arguments) == 6:
        dtype = None
    elif kind == ("torch._utils", "_rebuild_tensor_v3") and len(arguments) == 7 and type(arguments[6]) is Named:
        dtype = arguments[6].name
    else:
        return None
    storage, offset, shape, stride = arguments[:4]
    if not all(type(numbers) is tuple and _are_sizes(numbers) for numbers in (shape, stride, (offset,))):
        return None
    if type(storage) is not Stored or len(shape) != len(stride) or len(shape) > _DIMENSIONS_MAX:
        return None
    return TensorOutline(storage_of(storage), offset, shape, stride, dtype)


def _are_sizes(numbers: tuple[Any, ...]) -> bool:
    # `type`, not isinstance: True is an int, and a size of True is a forgery.
    return all(type(number) is int and 0 <= number <= _INT_MAX for number in numbers)
