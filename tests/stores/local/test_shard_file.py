"""A shard as a file: what becomes of one that is given up on a disk that refuses everything."""

import errno
import os
from pathlib import Path

import pytest

from replicated_ckpt.errors import StoreFull
from replicated_ckpt.stores.local.shard_file import FileSink
from tests.harness.processes import open_below


def test_a_part_that_the_disk_does_not_remove_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the shard was given up for is raised, with its type; the file that stays is named in the log, and closed."""

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        del missing_ok
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    sink = FileSink(tmp_path / "__0_0.distcp")
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreFull), sink:
        raise StoreFull("store", "write", "__0_0.distcp")
    assert "__0_0.distcp.part is not removed now" in caplog.text
    assert open_below(tmp_path) == []
