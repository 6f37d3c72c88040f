"""Texts for the places where a load searched for a shard, and the hint. It imports no module of ours."""

import errno
import os
from collections.abc import Sequence

NOT_REACHED = ": not reached"
"""After the name of a place that did not answer."""
MOVED = "another job has replaced or removed it there since"
"""For a place that had the checkpoint when the load began."""
OBJECT_STORE = "the object store"
_SHORTAGES = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)))


def is_shortage(text: str) -> bool:
    """Whether an error means that the process could open no file, which is no evidence of missing files."""
    return any(shortage in text for shortage in _SHORTAGES)


def next_step(searched: Sequence[str], *, is_latest: bool) -> str:
    """The hint if no searched place has an intact copy. `is_latest`: the load asked for "latest"."""
    if any(MOVED in place for place in searched):
        return "Load again: it is looked for anew, and what has taken its place is found."
    absent = [place.partition(NOT_REACHED)[0] for place in searched if NOT_REACHED in place]
    step = "No store that was searched has it: bring back a node that is not named above, if one held a copy"
    # First: out of descriptors every place fails, whatever lies there.
    if any(map(is_shortage, searched)):
        step = "Raise `ulimit -n`, or what else is short where a file could not be read, and load again"
    elif any("PermissionError" in place for place in searched):
        step = "Let the user who loads read what is named above (`ls -l` shows whose it is), and load again"
    elif absent or not searched:
        step = f"{_bring_back(absent)}, and load again"
    older = "" if is_latest else ', or load an older checkpoint ("latest" picks the newest one that is whole)'
    return f"{step}{older}."


def _bring_back(absent: Sequence[str]) -> str:
    nodes = [place for place in absent if place != OBJECT_STORE and "://" not in place]
    back = f"Bring back {' and '.join(nodes) or 'the nodes of the checkpoint'}, with the store"
    if len(nodes) == len(absent):
        return back
    answers = f"that {OBJECT_STORE} answers, and takes the credentials"
    return f"{back}, see {answers}" if nodes else f"See {answers}"
