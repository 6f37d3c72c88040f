"""Damage to files that agents look at meanwhile."""

from pathlib import Path

from replicated_ckpt.core.integrity.checksum import crc32c


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


def make_newer(manifest: Path) -> None:
    """Makes a manifest one of a format that only a newer version of the package reads, intact."""
    body = manifest.read_text().partition('"manifest":')[2].strip()[:-1].replace('"version":1', '"version":99')
    manifest.write_text(f'{{"crc32c":{crc32c(body.encode())},\n"manifest":{body}}}\n')
