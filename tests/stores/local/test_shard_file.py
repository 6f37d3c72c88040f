"""A shard as a file: aborting it on a failing disk, and reading its footer."""

import errno
import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES, size_with_footer, usual_footer_bytes
from replicated_ckpt.errors import StoreFull
from replicated_ckpt.stores import verified
from replicated_ckpt.stores.local.shard_file import FileSink, ShardFile
from replicated_ckpt.testing.shards import expect, make_data, table_of
from tests.harness.processes import open_below


def test_a_part_that_the_disk_does_not_remove_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the partial file cannot be removed, the original error is raised, and the log names the file. Its descriptor
    is closed.
    """

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        del missing_ok
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    sink = FileSink.create(tmp_path / "__0_0.distcp")
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreFull), sink:
        raise StoreFull("store", "write", "__0_0.distcp")
    assert "__0_0.distcp.part is not removed now" in caplog.text
    assert open_below(tmp_path) == []


@pytest.mark.parametrize(
    "data_bytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 4097 * BLOCK_BYTES, 10**12 + 7]
)
def test_the_length_of_a_footer_follows_from_the_size_of_its_file(data_bytes: int) -> None:
    """The length of a footer follows from the size of the shard file."""
    assert data_bytes + usual_footer_bytes(size_with_footer(data_bytes)) == size_with_footer(data_bytes)


@pytest.mark.parametrize(
    ("block_bytes", "at_once", "reads"),
    [
        (BLOCK_BYTES, verified.FIRST_FOOTER_BYTES, 1),
        (BLOCK_BYTES, 30, 2),
        (64, verified.FIRST_FOOTER_BYTES, 2),
        (1 << 20, verified.FIRST_FOOTER_BYTES, 2),
    ],
)
def test_a_footer_is_read_in_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, at_once: int, reads: int
) -> None:
    """Opening reads an ordinary footer in one request, and a longer one, or one of another block size, in two."""
    monkeypatch.setattr(verified, "FIRST_FOOTER_BYTES", at_once)
    data = make_data(2 * BLOCK_BYTES + 5)
    table = table_of([data], block_bytes)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(data + table.encode())
    shard = ShardFile(partial(os.open, path, os.O_RDONLY), "here", path.name, expect(path.read_bytes()))
    with mock.patch.object(ShardFile, "_fill", autospec=True, side_effect=ShardFile._fill) as fill:
        shard.open()
    assert len(fill.mock_calls) == reads
    assert shard.table.file_crc() == table.file_crc()
    assert shard.read(BLOCK_BYTES - 3, 9) == data[BLOCK_BYTES - 3 : BLOCK_BYTES + 6]
    shard.close()
