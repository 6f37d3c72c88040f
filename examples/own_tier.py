"""A bucket in an SQLite file with one row for each object, and the test of its contract.

Each statement is a transaction, so an object is replaced completely or not at all. docs/own-tier.md has the contract.
"""

import sqlite3
from contextlib import closing

import pytest

from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing
from replicated_ckpt.stores.bucket_client.client import PART_BYTES, Listing
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.testing import ObjectClientContract


class SqliteClient:
    has_conditions = True

    def __init__(self, target):
        self.target = target
        self._path = target.url.removeprefix("file://")
        self._all("CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB NOT NULL)")

    def _all(self, statement, *values):
        with closing(sqlite3.connect(self._path, timeout=30)) as database, database:
            return database.execute(statement, values).fetchall()

    def _one(self, what, op, key, *values):
        for (found,) in self._all(f"SELECT {what} FROM objects WHERE key = ?", *values, key):
            return found
        raise ObjectMissing(self.target.url, op, key, "no such row")

    def list_keys(self, directory):
        rows = self._all("SELECT key, length(data) FROM objects WHERE substr(key, 1, ?) = ?", len(directory), directory)
        below = {key[len(directory) :]: size for key, size in rows}
        sizes = {name: size for name, size in below.items() if "/" not in name}
        return Listing(sizes, tuple({name.partition("/")[0] for name in below.keys() - sizes.keys()}))

    def read(self, key, offset, target):
        data = self._one("substr(data, ?, ?)", "read", key, offset + 1, len(target))
        if len(data) != len(target):
            raise ObjectCorrupt(self.target.url, "read", key, f"{len(data)} of {len(target)} bytes at {offset}")
        target[:] = data

    def size_bytes(self, key):
        return self._one("length(data)", "look at", key)

    def put(self, key, data):
        self._all("INSERT OR REPLACE INTO objects VALUES (?, ?)", key, bytes(data))

    def version(self, key):
        return "".join(row for (row,) in self._all("SELECT 'v' || hex(data) FROM objects WHERE key = ?", key))

    def put_over(self, key, data, version):
        if not version:
            return bool(self._all("INSERT OR IGNORE INTO objects VALUES (?, ?) RETURNING key", key, bytes(data)))
        where = "WHERE key = ? AND 'v' || hex(data) = ? RETURNING key"
        return bool(self._all(f"UPDATE objects SET data = ? {where}", bytes(data), key, version))

    def put_shard(self, key, source, paced):
        whole, step = memoryview(bytearray(source.size_bytes)), source.piece_bytes(PART_BYTES)
        for offset in range(0, len(whole), step):
            source.read(offset, whole[offset : offset + step])  # verified against the checksums of the save
            paced(min(step, len(whole) - offset))
        self.put(key, whole)

    def copy(self, source, key):
        self.put(key, self._one("data", "copy", source))

    def delete(self, keys):
        for key in keys:
            self._all("DELETE FROM objects WHERE key = ?", key)

    def end_unfinished(self, prefix, older_than_s):
        return 0  # an interrupted transaction leaves nothing

    def close(self):
        """Nothing stays open."""


class Rows(dict):
    """The same objects, without the client."""

    def __init__(self, path):
        self.database = sqlite3.connect(path, isolation_level=None)

    def __getitem__(self, key):
        for (data,) in self.database.execute("SELECT data FROM objects WHERE key = ?", (key,)):
            return data
        raise KeyError(key)

    def __setitem__(self, key, data):
        self.database.execute("INSERT OR REPLACE INTO objects VALUES (?, ?)", (key, data))


class TestSqliteClient(ObjectClientContract):
    @pytest.fixture
    def client(self, tmp_path):
        return SqliteClient(ObjectTarget(f"file://{tmp_path}/bucket.db"))

    @pytest.fixture
    def raw(self, client, tmp_path):
        rows = Rows(tmp_path / "bucket.db")
        yield rows
        rows.database.close()
