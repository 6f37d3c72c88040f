"""Puts a directory of small files of a framework into a checkpoint as bytes, and back."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from replicated_ckpt.dcp.objects.weights_only import save_again
from replicated_ckpt.errors import ManifestInvalid
from replicated_ckpt.stores.files.existence import is_plain_file

_TORCH_FILES = re.compile(r".*\.(pt|pth|bin|pkl)")


def collect_files(directory: Path) -> dict[str, bytes]:
    """The content of the files in a directory and below it, by relative path."""
    # No links: through a hostile one, any file of this user could get into the checkpoint.
    files = sorted(file for file in directory.rglob("*") if is_plain_file(file))
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def put_files(
    directory: Path,
    files: Mapping[str, bytes],
    *,
    torch_files: re.Pattern[str] = _TORCH_FILES,
    trust_pickles: bool = False,
) -> None:
    """Writes files of `collect_files`, as read from a checkpoint.

    The framework reads `torch_files` by `torch.load`. Unless `trust_pickles`, this process reads them safely first, and
    writes them anew: torch's own unpickler bounds neither time nor memory.

    Raises:
        ManifestInvalid: a path leads out of the directory. ObjectUnsafe: a torch file names a class that is not allowed.
            Nothing was written.
    """
    # Checks all paths before the first write, so that a hostile checkpoint leaves nothing behind.
    for path in files:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ManifestInvalid(
                f"The checkpoint has a file {path!r}, which lies outside its directory.",
                "No save writes such a file. Find out who can write to the checkpoint, and load another checkpoint.",
            )
    checked = [] if trust_pickles else [path for path in files if torch_files.fullmatch(path)]
    again = {path: save_again(memoryview(files[path]), path, "the checkpoint").getvalue() for path in checked}
    for path, content in {**files, **again}.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
