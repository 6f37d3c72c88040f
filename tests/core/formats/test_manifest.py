"""The manifest: decoding inverts encoding, and invalid manifests are refused."""

import json
from dataclasses import asdict
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.manifest import VERSION, Manifest, NodeEntry, ShardEntry, UploadEntry, decode_manifest
from replicated_ckpt.errors import ManifestInvalid, ManifestVersionUnknown


def manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "save_id": "0123456789abcdef" * 2,
        "checkpoint_id": "run/step-10",
        "sequence": 3,
        "created_unix_s": 1.5,
        "world_size": 2,
        "copies": 2,
        "metadata_bytes": 10,
        "metadata_crc32c": 77,
        "nodes": (NodeEntry("a", "host-a", "rack1", (0,)), NodeEntry("b", "host-b", None, (1,))),
        "shards": {"__0_0.distcp": ShardEntry(5, 9, 0, "a", ("a", "b"))},
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def resealed(raw: bytes, change: dict[str, object]) -> bytes:
    """The manifest with other fields and a matching checksum."""
    fields = json.loads(raw)["manifest"]
    body = json.dumps({**fields, **change})
    return f'{{"crc32c":{crc32c(body.encode())},\n"manifest":{body}}}\n'.encode()


def test_decoding_inverts_encoding() -> None:
    """Decoding inverts encoding, and the bytes are JSON for other tools."""
    raw = manifest().encode()
    assert decode_manifest(raw, "here") == manifest()
    assert json.loads(raw)["manifest"]["checkpoint_id"] == "run/step-10"


@pytest.mark.parametrize("upload", [None, UploadEntry("s3://bucket", True, 9, 5, "f" * 32)])
def test_every_field_is_written(upload: UploadEntry | None) -> None:
    """The JSON has all fields, and those of nested objects."""
    whole = manifest(upload=upload, notes={"metrics": {"loss": 0.5}})
    assert json.loads(whole.encode())["manifest"] == json.loads(json.dumps({"version": VERSION, **asdict(whole)}))


@pytest.mark.parametrize("notes", [{"metrics": {"loss": 0.5, "bad": None}}, {"metadata": {"a": [1, {"b": "ü"}]}}, {}])
def test_notes_are_decoded(notes: dict[str, object]) -> None:
    """The user's notes are decoded unchanged. A manifest of an older version has none."""
    assert decode_manifest(manifest(notes=notes).encode(), "here").notes == notes
    fields = json.loads(manifest().encode())["manifest"]
    del fields["notes"]
    body = json.dumps(fields)
    raw = f'{{"crc32c":{crc32c(body.encode())},\n"manifest":{body}}}\n'.encode()
    assert decode_manifest(raw, "here").notes == {}


@pytest.mark.parametrize(
    "notes",
    [
        None,
        [],
        {"other": {}},
        {"metrics": []},
        {"metrics": {"loss": "0.5"}},
        {"metrics": {"loss": float("inf")}},
        {"metrics": {"loss": True}},
        {"metadata": "text"},
        {"metadata": {"x": "y" * (1 << 16)}},
    ],
)
def test_invalid_notes_are_refused(notes: object) -> None:
    """Notes with unknown fields, metrics that are not finite numbers, or too many bytes are refused."""
    with pytest.raises(ManifestInvalid):
        decode_manifest(resealed(manifest().encode(), {"notes": notes}), "here")


def test_any_flipped_bit_is_noticed() -> None:
    """A manifest with any flipped bit raises ManifestInvalid."""
    raw = manifest().encode()
    for position, bit in product(range(len(raw)), range(8)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << bit
        with pytest.raises(ManifestInvalid):
            decode_manifest(bytes(damaged), "here")


@pytest.mark.parametrize(
    "change",
    [
        {"save_id": "../../etc"},
        {"checkpoint_id": "../outside"},
        {"checkpoint_id": "latest"},
        {"sequence": -1},
        {"sequence": True},
        {"world_size": "2"},
        {"created_unix_s": -1e300},
        {"created_unix_s": -1},
        {"created_unix_s": float("nan")},
        {"shards": {"../x": {}}},
        {"shards": {"__0_0.distcp": {}}},
        {
            "shards": {
                "__0_0.distcp": {"size_bytes": 1, "crc32c": 1 << 32, "owner_rank": 0, "owner_node": "a", "holders": []}
            }
        },
        {"shards": {"__0_0.distcp": {"size_bytes": 1, "crc32c": 1, "owner_rank": 0, "owner_node": "z", "holders": []}}},
        {"nodes": None},
    ],
)
def test_invalid_fields_are_refused(change: dict[str, object]) -> None:
    """A manifest with invalid fields is refused although its checksum matches."""
    with pytest.raises(ManifestInvalid, match="here"):
        decode_manifest(resealed(manifest().encode(), change), "here")


def test_a_newer_format_is_refused() -> None:
    """A manifest of a newer format version raises ManifestVersionUnknown."""
    with pytest.raises(ManifestVersionUnknown, match="version 2"):
        decode_manifest(resealed(manifest().encode(), {"version": 2}), "here")


@given(st.binary(max_size=200))
def test_random_bytes_are_no_manifest(raw: bytes) -> None:
    """Random bytes raise ManifestInvalid."""
    with pytest.raises(ManifestInvalid):
        decode_manifest(raw, "here")
