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
        return "Load again: the next load finds the replacement."
    absent = [place.partition(NOT_REACHED)[0] for place in searched if NOT_REACHED in place]
    step = "No searched store has it: bring back a node that is not named above, if one held a copy"
    # First: out of descriptors every place fails, whatever lies there.
    if any(map(is_shortage, searched)):
        step = "A file could not be read for lack of file descriptors or similar: raise `ulimit -n`, and load again"
    elif any("PermissionError" in place for place in searched):
        step = "Give the loading user read permission for the files above (`ls -l` shows the owner), and load again"
    elif absent or not searched:
        step = f"{_bring_back(absent)}, and load again"
    older = "" if is_latest else ', or load an older checkpoint ("latest" takes the newest complete one)'
    return f"{step}{older}."


def _bring_back(absent: Sequence[str]) -> str:
    nodes = [place for place in absent if place != OBJECT_STORE and "://" not in place]
    back = f"Bring back {' and '.join(nodes) or 'the nodes of the checkpoint'}, with the store"
    if len(nodes) == len(absent):
        return back
    answers = f"check that {OBJECT_STORE} answers and accepts the credentials"
    return f"{back}, see {answers}" if nodes else f"See {answers}"
