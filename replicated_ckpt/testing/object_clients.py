"""The contract of an ObjectClient, the object tier's interface to a bucket."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry, UploadEntry
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, StoreUnavailable
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.client import PART_BYTES, ObjectClient
from replicated_ckpt.testing.shards import add_footer, expect, flip_bit, make_data, open_source

METADATA = b"metadata" * 50
SHARD = "__0_0.distcp"
NODE = "0" * 31 + "1"


def save_to_bucket(bucket: Bucket, folder: Path, *, sequence: int) -> Manifest:
    """Uploads and commits step-1. A save with a sequence above 1 may replace another one, so it gets its own prefix."""
    raw, _ = add_footer(make_data(seed=sequence))
    expected = expect(raw)
    manifest = Manifest(
        save_id=f"{sequence:032x}",
        checkpoint_id="step-1",
        sequence=sequence,
        created_unix_s=0.0,
        world_size=1,
        copies=1,
        metadata_bytes=len(METADATA),
        metadata_crc32c=crc32c(METADATA),
        nodes=(NodeEntry(NODE, "host", None, (0,)),),
        shards={SHARD: ShardEntry(expected.size_bytes, expected.crc32c, 0, NODE, (NODE,))},
    )
    upload = UploadEntry(bucket.client.target.url, sequence > 1, len(METADATA), crc32c(METADATA))
    manifest = replace(manifest, upload=upload)
    with open_source(folder, raw) as source:
        bucket.put_shard(manifest, SHARD, source, lambda _: None)
    bucket.commit(manifest, manifest.encode(), METADATA)
    return manifest


KEY = "step-1/__0_0.distcp"
ODD_KEYS = ("a b/c d", "ü/ß", "a+b/c%20d", "a#b/c#d", "it's/(one)")
THREADS = 8


class RawObjects(Protocol):
    """The objects under the client's prefix, accessed without it, so that tests check `put` and `read` independently."""

    def __getitem__(self, key: str) -> bytes:
        """The object's bytes. Raises KeyError: there is no such object."""

    def __setitem__(self, key: str, data: bytes) -> None: ...


class ObjectClientContract:
    """Inherit, and override the fixtures `client`, for an empty bucket, and `raw`, the same bucket without the client.

    `has_conditions`: `put_over` writes only over the version that the caller has seen. False: it always writes. If two
    agents then commit at once, the later one wins, and both detect that by the mark that they read back.
    `is_paced`: `put_shard` calls `paced` before it sends. False: the upload rate has no limit.
    `has_copies`: `copy` works. False: unchanged shards are uploaded again.
    `listed_objects`: number of objects, and of directories, in one listing. Most stores answer in pages of 1,000.
    """

    has_conditions = True
    is_paced = True
    has_copies = True
    listed_objects = 1100

    @pytest.fixture
    def client(self) -> ObjectClient:
        """A client of an empty bucket."""
        raise NotImplementedError

    @pytest.fixture
    def raw(self, client: ObjectClient) -> RawObjects:
        """The same objects, without the client."""
        raise NotImplementedError

    def test_what_is_put_lies_there(self, client: ObjectClient, raw: RawObjects) -> None:
        """All bytes are stored, also of an empty object. A shorter object replaces a longer one completely."""
        for data in (b"0123456789", b"abc", b""):
            client.put("a/b/one", data)
            assert raw["a/b/one"] == data

    def test_what_lies_there_is_read(self, client: ObjectClient, raw: RawObjects) -> None:
        """Any range can be read. No byte outside the passed memory changes."""
        raw["a/one"] = b"0123456789"
        for offset, length in ((0, 10), (3, 4), (9, 1), (4, 0)):
            memory = bytearray(b"_" * (length + 2))
            client.read("a/one", offset, memoryview(memory)[1 : length + 1])
            assert memory == b"_" + b"0123456789"[offset : offset + length] + b"_"
        assert client.size_bytes("a/one") == 10

    @pytest.mark.parametrize(("offset", "length"), [(8, 4), (10, 1), (100, 1)])
    def test_a_range_past_the_end_is_never_filled_up(
        self, client: ObjectClient, raw: RawObjects, offset: int, length: int
    ) -> None:
        """A short object is an error, not a short read."""
        raw["a/one"] = b"0123456789"
        with pytest.raises((ObjectCorrupt, ObjectMissing)):
            client.read("a/one", offset, memoryview(bytearray(length)))

    def test_what_is_not_there_is_missing(self, client: ObjectClient) -> None:
        """The error is ObjectMissing, with bucket and key. A load then tries another source at once."""
        with pytest.raises(ObjectMissing, match="a/none"):
            client.read("a/none", 0, memoryview(bytearray(1)))
        with pytest.raises(ObjectMissing) as raised:
            client.size_bytes("a/none")
        assert raised.value.store == client.target.url

    def test_a_copy_has_the_same_bytes_and_stays_as_it_is(self, client: ObjectClient, raw: RawObjects) -> None:
        """A copy may replace another object. It stays when its source is replaced or deleted."""
        if not self.has_copies:
            return
        raw["a b/__0_0.distcp"], raw["c/ü.distcp"] = b"0123456789", b"old"
        for _ in range(2):
            client.copy("a b/__0_0.distcp", "c/ü.distcp")
            assert raw["c/ü.distcp"] == b"0123456789"
        client.put("a b/__0_0.distcp", b"new")
        assert raw["c/ü.distcp"] == b"0123456789"
        client.delete(["a b/__0_0.distcp"])
        assert raw["c/ü.distcp"] == b"0123456789"
        assert list(client.list_keys("c/").sizes) == ["ü.distcp"]
        with pytest.raises(ObjectMissing):
            client.copy("a b/__0_0.distcp", "c/none")

    def test_a_listing_is_of_one_level(self, client: ObjectClient, raw: RawObjects) -> None:
        """It has the objects' sizes and the directories' names at this level, and no name that only has the same prefix."""
        for key, data in {"a/two": b"xyz", "a/b/one": b"0", "a/b/c/d": b"", "ab": b"1", "a-b/x": b""}.items():
            raw[key] = data
        listing = client.list_keys("a/")
        assert (dict(listing.sizes), set(listing.directories)) == ({"two": 3}, {"b"})
        top = client.list_keys("")
        assert (dict(top.sizes), set(top.directories)) == ({"ab": 1}, {"a", "a-b"})

    def test_a_directory_without_objects_is_empty(self, client: ObjectClient) -> None:
        """It is no error: a save looks in this way whether a name is free."""
        listing = client.list_keys("nothing/")
        assert (dict(listing.sizes), set(listing.directories)) == ({}, set())

    def test_a_long_listing_is_whole(self, client: ObjectClient, raw: RawObjects) -> None:
        """It is complete even if the store answers in pages."""
        names = {f"__{number}_0.distcp" for number in range(self.listed_objects)}
        directories = {f"__{number}_0" for number in range(self.listed_objects)}
        for name in (*names, *(f"{directory}/x" for directory in directories)):
            raw[f"step-1/{name}"] = b"x"
        listing = client.list_keys("step-1/")
        assert (set(listing.sizes), set(listing.directories)) == (names, directories)

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_names_are_names_like_others(self, client: ObjectClient, raw: RawObjects, key: str) -> None:
        """An object with spaces or special characters is stored, listed, read and deleted under exactly its name."""
        directory, _, name = key.partition("/")
        client.put(key, b"data")
        assert raw[key] == b"data"
        assert client.list_keys("").directories == (directory,)
        assert dict(client.list_keys(f"{directory}/").sizes) == {name: 4}
        memory = bytearray(4)
        client.read(key, 0, memoryview(memory))
        assert memory == b"data"
        client.delete([key])
        with pytest.raises(KeyError):
            raw[key]

    def test_what_is_deleted_is_gone_and_nothing_else(self, client: ObjectClient, raw: RawObjects) -> None:
        """Several keys are deleted at once. A missing key is no error, and the others are deleted."""
        for key in ("a/one", "a/one-more", "a/two"):
            raw[key] = b"x"
        client.delete(["a/one", "a/none", "a/two"])
        assert set(client.list_keys("a/").sizes) == {"one-more"}
        client.delete([])

    def test_a_mark_is_put_only_over_what_was_seen(self, client: ObjectClient, raw: RawObjects) -> None:
        """Of two agents that have seen the same version, only one can write. Without conditions both can."""
        assert client.has_conditions or not self.has_conditions
        assert client.version("a") == ""
        assert client.put_over("a", b"one", "")
        assert client.put_over("a", b"two", "") is not self.has_conditions
        seen = client.version("a")
        assert seen or not self.has_conditions
        assert client.put_over("a", b"three", seen)
        assert client.put_over("a", b"four", seen) is not self.has_conditions
        assert raw["a"] == (b"three" if self.has_conditions else b"four")

    @pytest.mark.parametrize("size_bytes", [0, 700_000, PART_BYTES * 2 + 12345])
    def test_a_shard_arrives_whole(
        self, client: ObjectClient, raw: RawObjects, tmp_path: Path, size_bytes: int
    ) -> None:
        """A shard of one or several parts replaces an older object. `paced` is called for every byte."""
        raw[KEY] = b"of an earlier save"
        whole, _ = add_footer(make_data(size_bytes))
        asked: list[int] = []
        with open_source(tmp_path, whole) as source:
            client.put_shard(KEY, source, asked.append)
        assert raw[KEY] == whole
        assert not self.is_paced or sum(asked) >= len(whole)

    @pytest.mark.parametrize("position", [100, -3])
    def test_a_flipped_bit_on_the_disk_is_not_uploaded(
        self, client: ObjectClient, tmp_path: Path, position: int
    ) -> None:
        """Damage in data or footer is detected before the upload is complete, and no object appears."""
        whole, _ = add_footer(make_data())
        with pytest.raises(ObjectCorrupt), open_source(tmp_path, flip_bit(whole, position), expect(whole)) as source:
            client.put_shard(KEY, source, allow)
        assert dict(client.list_keys("step-1/").sizes) == {}

    def test_an_upload_that_is_broken_off_is_no_object(self, client: ObjectClient, tmp_path: Path) -> None:
        """`paced` raises when the agent stops. Then no object has the shard's key."""

        def stop(size_bytes: int) -> None:
            raise StoreUnavailable("the pace", "wait", KEY, f"{size_bytes} bytes: the agent ends")

        if not self.is_paced:
            pytest.skip("put_shard does not call paced")
        whole, _ = add_footer(make_data(PART_BYTES * 2))
        with open_source(tmp_path, whole) as source:
            with pytest.raises(StoreUnavailable, match="the agent ends"):
                client.put_shard(KEY, source, stop)
            assert dict(client.list_keys("step-1/").sizes) == {}
            client.put_shard(KEY, source, allow)  # despite parts of the first attempt
        assert client.size_bytes(KEY) == len(whole)

    def test_ending_what_is_unfinished_leaves_what_is_finished(self, client: ObjectClient, raw: RawObjects) -> None:
        """`end_unfinished` aborts only uploads that never became objects."""
        raw[KEY] = b"data"
        assert client.end_unfinished("step-1/", 0) == 0
        assert raw[KEY] == b"data"

    def test_threads_share_a_client(self, client: ObjectClient, raw: RawObjects) -> None:
        """Each of many concurrent callers gets its own result."""

        def put_and_read(number: int) -> None:
            data = make_data(20_000, seed=number)
            client.put(f"a/{number}", data)
            memory = bytearray(len(data))
            client.read(f"a/{number}", 0, memoryview(memory))
            assert memory == data
            client.list_keys("a/")

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(put_and_read, range(4 * THREADS)))
        assert raw["a/0"] == make_data(20_000, seed=0)

    def test_a_checkpoint_is_committed_found_and_removed(self, client: ObjectClient, tmp_path: Path) -> None:
        """An agent commits shards, manifest and mark. A removal deletes the mark first."""
        bucket = Bucket(client)
        assert bucket.is_empty("step-1")
        manifest = save_to_bucket(bucket, tmp_path, sequence=1)
        (found,) = bucket.saves()
        assert found.save_id == manifest.save_id
        assert bucket.manifest_raw(found) == manifest.encode()
        assert bucket.small("step-1/.metadata", found.metadata_bytes) == METADATA
        assert all(bucket.is_intact(manifest, name) for name in manifest.shards)
        newer = save_to_bucket(bucket, tmp_path, sequence=2)
        (found,) = bucket.saves()
        assert found.save_id == newer.save_id
        bucket.remove(found)
        assert bucket.saves() == ()


def allow(size_bytes: int) -> None:
    """A `paced` without a limit."""
    del size_bytes
