"""Damage to files that agents may read at the same time."""

from pathlib import Path

from replicated_ckpt.core.integrity.checksum import crc32c


def flip(path: Path, position: int | None = None) -> None:
    """Flips a bit in place, by default in the middle. The file is never short, and never another file.

    An agent that read a file while it was rewritten would find it short, and repair it before the test continues.
    """
    at = path.stat().st_size // 2 if position is None else position % path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def make_newer(manifest: Path) -> None:
    """Changes a manifest to an intact one of a newer format, which this version of the package cannot read."""
    body = manifest.read_text().partition('"manifest":')[2].strip()[:-1].replace('"version":1', '"version":99')
    manifest.write_text(f'{{"crc32c":{crc32c(body.encode())},\n"manifest":{body}}}\n')
