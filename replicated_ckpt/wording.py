"""Formatting of counts, sizes, tables, and texts of other processes. It imports no other module of the package."""

import errno
import os
from collections.abc import Collection, Sequence
from shlex import quote


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 node", "2 nodes"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def list_some(names: Sequence[str], most: int, noun: str = "") -> str:
    """The first `most` names and the number of the others: "a, b and 3 more", or "and 3 more nodes"."""
    left = len(names) - most
    more = f" and {plural(left, f'more {noun}') if noun else f'{left} more'}" if left > 0 else ""
    return ", ".join(names[:most]) + more


def describe_bytes(count: float) -> str:
    """A size in the largest unit in which it is at least 1, with three digits: "1.25 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def escape_controls(text: str) -> str:
    """The text on one line: control characters and line breaks, as in names from elsewhere, become escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """The rows as lines of a table. Columns whose index is in `left` are aligned to the left, the others to the right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if number in left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def describe_way_out(checkpoint_id: str, save_id: str, nodes: Collection[str], root: str = "ROOT") -> str:
    """The hint if another run's save has this checkpoint's name on `nodes`.

    `root`: the root on those nodes, quoted for a shell.
    """
    where = f"node {' and node '.join(nodes)}" if nodes else "each node that has it"
    return (
        f"to keep both, rename its directory on {where}; to remove it, run there `replicated-ckpt rm "
        f"{quote(checkpoint_id)} --save {save_id} --root {root}`"
    )


def one_line(text: object, chars_max: int = 2000) -> str:
    """A text from another process for a log or an error. It is cut, and has no line breaks that could fake a log line."""
    # Cut twice: escapes make the text longer, and a huge text must not be escaped as a whole.
    return escape_controls(str(text)[:chars_max])[:chars_max]


NOT_REACHED = ": not reached"
"""Follows the name of a searched place that did not answer."""
MOVED = "another job has replaced or removed it there since"
"""The reason at a place that had the checkpoint when the load began."""
OBJECT_STORE = "the object store"
_SHORTAGES = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)))


def is_shortage(text: str) -> bool:
    """Whether an error means that the process could open no file, which is not evidence of missing files."""
    return any(shortage in text for shortage in _SHORTAGES)


def next_step(searched: Sequence[str], *, is_latest: bool) -> str:
    """The hint if no searched place has an intact copy. `is_latest`: the load asked for "latest"."""
    if any(MOVED in place for place in searched):
        return "Load again: the next load finds the replacement."
    absent = [place.partition(NOT_REACHED)[0] for place in searched if NOT_REACHED in place]
    step = "No searched store has it: bring back a node that is not named above, if one held a copy"
    # Before the other reasons: a process without descriptors can read no place, whatever the place holds.
    if any(map(is_shortage, searched)):
        step = "A file could not be read for lack of file descriptors or similar: raise `ulimit -n`, and load again"
    elif any("PermissionError" in place for place in searched):
        step = "Give the loading user read permission for the files above (`ls -l` shows the owner), and load again"
    elif absent or not searched:
        step = f"{_bring_back(absent)}, and load again"
    older = "" if is_latest else ', or load an older checkpoint ("latest" takes the newest one without known damage)'
    return f"{step}{older}."


def _bring_back(absent: Sequence[str]) -> str:
    nodes = [place for place in absent if place != OBJECT_STORE and "://" not in place]
    back = f"Bring back {' and '.join(nodes) or 'the nodes of the checkpoint'}, with the store"
    if len(nodes) == len(absent):
        return back
    answers = f"that {OBJECT_STORE} answers and accepts the credentials"
    return f"{back}, check {answers}" if nodes else f"Check {answers}"
