"""A directory of small files that a framework wrote, as bytes that lie in a checkpoint, and back."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from replicated_ckpt.errors import ManifestInvalid
from replicated_ckpt.stores.files.existence import is_plain_file


def collect_files(directory: Path) -> dict[str, bytes]:
    """What lies in a directory and below it, by path from there."""
    files = sorted(file for file in directory.rglob("*") if is_plain_file(file))
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def put_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes what `collect_files` has read, as a checkpoint has it.

    Raises:
        ManifestInvalid: a path leads out of the directory; nothing was written.
    """
    for path in files:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ManifestInvalid(
                f"The checkpoint has a file {path!r}, which would lie outside of the directory of its files.",
                "No save makes such a checkpoint: find out who can write to it, and load another one.",
            )
    for path, content in files.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
