"""Bounds on a tree before another unpickler reads its pickle: on repeated sharing, and on the depth of nesting.

Unpicklers, picklers and loops visit a shared part each time that it is referenced, and hash keys completely. So a few
hundred bytes can keep them busy for years, and a deeply nested tuple overflows the C stack and ends the process.
"""

from collections.abc import Iterator
from typing import Any

from replicated_ckpt.core.pickles.tree import LEAVES, Fields, Made, Named, Pairs, PickleUnsafe, Stored, member_in

DEPTH_MAX = 100
WEIGHT_MIN = 1 << 20
WEIGHT_PER_BYTE = 64
"""A tree may weigh `WEIGHT_MIN` plus this for each byte of its pickle. A node weighs 1 per visit, a text by length."""

_TEXT_BYTES = 64
_HOOKS = frozenset(
    f"__{name}__"
    for name in ("class", "getnewargs", "getnewargs_ex", "getstate", "module", "reduce", "reduce_ex", "setstate")
)
"""Attributes by which an instance controls picklers."""


def check_bounds(tree: Any, size_bytes: int) -> int:
    """The weight of the tree. Below the limit, a walk through its values takes time and depth in proportion to its size.

    Raises:
        PickleUnsafe: the tree exceeds a limit, a part contains itself, or an attribute would control a pickler.
    """
    weight_max = WEIGHT_MIN + WEIGHT_PER_BYTE * size_bytes
    extents: dict[int, tuple[int, int]] = {}
    begun: set[int] = set()
    # A loop, not a recursion: the depth is what is being checked.
    to_do = [tree]
    while to_do:
        node = to_do[-1]
        if id(node) in extents or type(node) in LEAVES:
            to_do.pop()
            continue
        if id(node) in begun:
            extents[id(node)] = _extent(node, extents, weight_max)
            to_do.pop()
            continue
        begun.add(id(node))
        for child in _children(node):
            if type(child) not in LEAVES and id(child) not in extents:
                # A circle: every walk through the value would never end.
                if id(child) in begun:
                    raise PickleUnsafe("holds a part that contains itself")
                to_do.append(child)
    return extents[id(tree)][0] if id(tree) in extents else 1


def _extent(node: Any, extents: dict[int, tuple[int, int]], weight_max: int) -> tuple[int, int]:
    """Weight and depth of a node whose children's are known."""
    weight, depth = 1, 0
    for child in _children(node):
        if type(child) in LEAVES:
            weight += 1 + len(child) // _TEXT_BYTES if type(child) in (str, bytes) else 1
        else:
            below, deep = extents[id(child)]
            weight += below
            depth = max(depth, deep)
    # As in a billion-laughs file: each level refers to the one below many times.
    if weight > weight_max:
        raise PickleUnsafe("repeats its parts beyond the limit")
    if depth >= DEPTH_MAX:
        raise PickleUnsafe(f"is nested more than {DEPTH_MAX} levels deep")
    return weight, depth + 1


def _children(node: Any) -> Iterator[Any]:
    if type(node) is Made:
        yield from (node.called, node.arguments, node.state, node.contents)
    elif type(node) is Stored:
        yield node.identity
    else:
        items = [part for pair in node.items() for part in pair] if type(node) is Fields else node
        # With its own __reduce__ a safe class would run any callable when it is pickled again.
        if type(node) in (Fields, Pairs) and any(type(key) is str and key in _HOOKS for key in items[::2]):
            raise PickleUnsafe("sets an attribute that controls picklers")
        yield from items


def names_in(tree: Any) -> set[Named]:
    """Every name in a tree. For a member of an enum its class, in either form of pickling."""
    found: set[Named] = set()
    seen: set[int] = set()
    to_do = [tree]
    while to_do:
        node = to_do.pop()
        if type(node) is Named:
            found.add(node)
        elif type(node) is Made and (member := member_in(node)) is not None:
            found.add(member[0])
        elif type(node) not in LEAVES and id(node) not in seen:
            seen.add(id(node))
            to_do += _children(node)
    return found
