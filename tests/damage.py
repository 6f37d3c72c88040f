"""Damage to files that agents look at meanwhile."""

from pathlib import Path


def flip(path: Path, position: int | None = None) -> None:
    """Flips a bit where it lies, in the middle if no position is given: at no moment is the file short, or another one.

    An agent that looked at a file that is being written anew would find it short, and mend it before the test goes on.
    """
    at = path.stat().st_size // 2 if position is None else position % path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
