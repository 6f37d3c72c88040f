"""Reading plain files: descriptors are closed, whatever is in a file's place."""

import contextlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from replicated_ckpt.stores.files.durable import hash_file
from replicated_ckpt.stores.files.existence import read_plain
from replicated_ckpt.stores.local.directories.catalog import Catalog
from tests.harness.processes import open_below


def look(root: Path) -> None:
    """Lists invalid manifests, as an agent does in each round."""
    assert list(Catalog(root).with_invalid_manifest()) == []


@pytest.mark.parametrize(
    "way",
    [
        look,
        lambda root: read_plain(root / "run" / "__0_0.distcp"),
        lambda root: hash_file(root / "run" / "__0_0.distcp", 1),
    ],
)
def test_a_directory_in_a_files_place_leaves_nothing_open(tmp_path: Path, way: Callable[[Path], object]) -> None:
    """With a directory in place of a shard, each function leaves no open descriptor. An agent's rounds would otherwise
    exhaust them.
    """
    (tmp_path / "run" / "__0_0.distcp").mkdir(parents=True)
    with contextlib.suppress(IsADirectoryError):
        way(tmp_path)
    assert open_below(tmp_path) == []


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Reading a small file allocates less than 1 MiB, not the 64 MiB that a manifest may have."""
    (tmp_path / "small").write_bytes(b"{}")
    tracemalloc.start()
    try:
        assert read_plain(tmp_path / "small") == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    (tmp_path / "large").write_bytes(bytes(100))
    assert len(read_plain(tmp_path / "large", 10)) == 10
