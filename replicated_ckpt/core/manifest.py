"""The manifest: the shards of one save, their intended holders, and the user's notes.

The inventory has the files that are in stores now.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from operator import eq
from typing import Any

from replicated_ckpt.core.divergence import DIVERGENCES_MAX, Divergence
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import SEQUENCE_MAX, ShardName, is_checkpoint_id, is_lineage, is_save_id
from replicated_ckpt.core.lineage import Version, moment, order_by_age
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, ManifestVersionUnknown
from replicated_ckpt.wording import one_line


def list_domains(domain: str | None, boot_id: str, host: str) -> tuple[str, ...]:
    """The failure domains of a node, the largest first: the user's domain (else the machine), the machine, the container.

    Containers have different host names, and share the boot id of their machine.
    """
    machine = boot_id or host
    return domain or machine, machine, f"{machine}/{host}"


def find_shared(domains: Sequence[str], taken: Iterable[Sequence[str]]) -> tuple[bool, ...]:
    """For each domain, the largest first: whether a node in `taken` has the same.

    The best place for a copy is the node with the smallest tuple.
    """
    shared = (tuple(map(eq, domains, others)) for others in taken)
    return max(shared, default=())


VERSION = 1
MANIFEST_BYTES_MAX = 64 << 20
"""Limit of a manifest: parsed JSON takes many times its size. The manifest of 100,000 ranks fits."""
_TEXT_CHARS_MAX = 4096
_U32 = (1 << 32) - 1


@dataclass(frozen=True)
class ShardEntry:
    """One shard as it was saved. `crc32c` covers the whole file, footer included."""

    size_bytes: int
    crc32c: int
    owner_rank: int
    owner_node: str
    holders: tuple[str, ...]
    """Intended holders of a copy, the owner's node first."""


@dataclass(frozen=True)
class NodeEntry:
    """A node of a save. `ranks` are its ranks within the saving process group. `boot_id`: the boot id of its host."""

    node_id: str
    host: str
    domain: str | None
    ranks: tuple[int, ...]
    boot_id: str = ""

    @property
    def domains(self) -> tuple[str, ...]:
        return list_domains(self.domain, self.boot_id, self.host)


@dataclass(frozen=True)
class UploadEntry:
    """The upload of a save to the object tier, and its `.metadata` there.

    `has_own_prefix`: its shards lie under its own prefix, because it may replace another save of the same id. Then the
    bucket's `.metadata` names other paths, and the nodes' `.metadata` contains two pickles: the nodes' own, where
    unpicklers stop, and after it the bucket's. Without an own prefix, both tiers have the same `.metadata`.
    `replaces`: the save that was committed in the bucket when this one was opened over it; "" if there was none.
    """

    url: str
    has_own_prefix: bool
    metadata_bytes: int
    metadata_crc32c: int
    replaces: str = ""


@dataclass(frozen=True)
class WeightsEntry:
    """The checkpoint without its optimizer, as `slim` leaves it. Its `.metadata` follows the full one in the same file.

    If a save has its own prefix in the bucket, the nodes' `.metadata` is `full | weights | bucket's full | bucket's
    weights`, otherwise `full | weights`. `local_bytes` and `bucket_bytes`: the sizes of the two parts for weights; the
    second is 0 without an own prefix. `crc32c`: CRC32C of both parts together. `bucket_crc32c`: CRC32C of the bucket's
    part. `dropped`: prefixes of the dropped names.
    """

    local_bytes: int
    crc32c: int
    bucket_bytes: int
    bucket_crc32c: int
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """One committed save.

    `lineage` identifies the run: the first save in a directory of checkpoints draws it at random, and later saves
    inherit it. `sequence` orders the saves of one lineage without a clock: one more than the largest that any node of
    the save had. `created_unix_s`, by the coordinator's clock, orders lineages, and saves that got the same sequence
    because their nodes had no contact.
    """

    save_id: str
    checkpoint_id: str
    sequence: int
    created_unix_s: float
    world_size: int
    copies: int
    metadata_bytes: int
    metadata_crc32c: int
    nodes: tuple[NodeEntry, ...]
    shards: Mapping[str, ShardEntry]
    upload: UploadEntry | None = None
    lineage: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Metrics and metadata of the user, as `encode_notes` returns them."""
    divergences: tuple[Divergence, ...] = ()
    """The first values that the save found to differ between ranks, DIVERGENCES_MAX at most."""
    weights: WeightsEntry | None = None
    """The save without its optimizer. None: it has no optimizer, or nothing else."""
    dropped: tuple[str, ...] = ()
    """The prefixes of the names of entries that were dropped; empty: the checkpoint is full."""

    @property
    def is_slim(self) -> bool:
        """Whether the save has only its weights left."""
        return bool(self.dropped)

    def slimmed(self) -> "Manifest":
        """The manifest of the same save without its optimizer: the same on every node. `weights` must not be None."""
        weights, upload = self.weights, self.upload
        assert weights is not None, "a checkpoint without an optimizer is not slimmed"
        size = weights.local_bytes + weights.bucket_bytes
        if upload is not None and upload.has_own_prefix:
            upload = replace(upload, metadata_bytes=weights.bucket_bytes, metadata_crc32c=weights.bucket_crc32c)
        elif upload is not None:
            upload = replace(upload, metadata_bytes=size, metadata_crc32c=weights.crc32c)
        shards = {name: entry for name, entry in self.shards.items() if part_of_shard(name) is not Part.OPTIMIZER}
        return replace(
            self,
            metadata_bytes=size,
            metadata_crc32c=weights.crc32c,
            shards=shards,
            upload=upload,
            weights=None,
            dropped=weights.dropped,
        )

    @property
    def version(self) -> Version:
        """The version that a commit compares with the published one."""
        return Version(self.lineage, self.sequence, self.created_unix_s, self.save_id)

    def encode(self) -> bytes:
        """JSON in two lines, a checksum and a body, so that a torn or edited file is detected.

        `asdict` is not used: its copies would take half the time of a repeated save of 1,024 ranks.
        """
        body = json.dumps({"version": VERSION, **vars(self)}, default=vars, sort_keys=True, separators=(",", ":"))
        return f'{{"crc32c":{crc32c(body.encode())},\n"manifest":{body}}}\n'.encode()

    def local_metadata(self, raw: bytes) -> bytes:
        """The part of the nodes' `.metadata` that describes the checkpoint as it is now, full or slim, on nodes."""
        return self._split_metadata(raw)[0]

    def slim_metadata(self, raw: bytes) -> bytes:
        """The nodes' `.metadata` of `slimmed()`, cut from this save's."""
        _, weights, _, bucket_weights = self._split_metadata(raw)
        return weights + bucket_weights

    def bucket_metadata(self, raw: bytes) -> bytes:
        """The part of the nodes' `.metadata` that lies in the bucket, with the shards' paths there."""
        return raw[-self.upload.metadata_bytes :] if self.upload is not None else raw

    def read_bucket_metadata(self, raw: bytes) -> bytes:
        """The part of the bucket's `.metadata` that describes the checkpoint as it is now, full or slim, there."""
        if self.weights is None:
            return raw
        has_own = self.upload is not None and self.upload.has_own_prefix
        return raw[: -(self.weights.bucket_bytes if has_own else self.weights.local_bytes)]

    def _split_metadata(self, raw: bytes) -> tuple[bytes, bytes, bytes, bytes]:
        """Splits the nodes' `.metadata` into full, weights, bucket's full and bucket's weights. Absent parts are empty."""
        upload, weights = self.upload, self.weights
        bucket_bytes = upload.metadata_bytes if upload is not None and upload.has_own_prefix else 0
        begin = len(raw) - bucket_bytes
        local = 0 if weights is None else weights.local_bytes
        there = 0 if weights is None else weights.bucket_bytes
        return raw[: begin - local], raw[begin - local : begin], raw[begin : len(raw) - there], raw[len(raw) - there :]

    @property
    def bucket_url(self) -> str:
        """The bucket to which the save is uploaded; "" if there is none."""
        return self.upload.url if self.upload is not None else ""

    @property
    def replaces_in_bucket(self) -> str:
        """The save that was committed in the bucket when this one was opened over it; "" if there was none."""
        return self.upload.replaces if self.upload is not None else ""

    @property
    def host_by_rank(self) -> dict[int, str]:
        return {rank: node.host for node in self.nodes for rank in node.ranks}

    @property
    def shard_sizes(self) -> dict[str, int]:
        return {name: entry.size_bytes for name, entry in self.shards.items()}

    def owner_of(self, shard: str) -> str:
        entry = self.shards[shard]
        host = next((node.host for node in self.nodes if node.node_id == entry.owner_node), "unknown host")
        return f"rank {entry.owner_rank} on node {entry.owner_node} ({host})"


def find_domains(manifests: Iterable[Manifest]) -> Mapping[str, tuple[str, ...]]:
    """The failure domains of each node, as its newest save recorded them. Of several runs, the one that saved last counts.

    Every node eventually has every manifest, so all nodes agree on the domain of a node that moved between two saves.
    """
    saves = {manifest.version: manifest for manifest in manifests if manifest.sequence}
    return {
        node.node_id: node.domains
        for version in sorted(saves, key=order_by_age(saves))
        for node in saves[version].nodes
    }


def decode_manifest(raw: bytes, source: str) -> Manifest:
    """The manifest in `raw`, fully validated. `source` names where it came from, for the error.

    Raises:
        ManifestVersionUnknown: written by a newer format.
        ManifestInvalid: any other defect.
    """
    # Checked before json.loads, which needs many times this memory.
    if len(raw) > MANIFEST_BYTES_MAX:
        raise ManifestInvalid(f"The manifest at {source} has more than {MANIFEST_BYTES_MAX} bytes.")
    try:
        head, body = raw.decode().rstrip("\n").split("\n", 1)
        document = json.loads(head + body)
        stored_crc, fields = document["crc32c"], document["manifest"]
        # The checksum covers the bytes as written: parsing and encoding again could change floats and escapes.
        body = body.removeprefix('"manifest":').removesuffix("}")
        if crc32c(body.encode()) != stored_crc:
            raise ManifestInvalid(f"The manifest at {source} fails its checksum.")
        # After the checksum: a flipped bit in the version must not look like a newer format.
        if fields["version"] != VERSION:
            raise ManifestVersionUnknown(f"The manifest at {source} has format version {fields['version']!r}.")
        return _check(_from_fields(fields), source)
    # ArithmeticError: a number too large for a float; RecursionError: deeply nested JSON.
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as exc:
        raise ManifestInvalid(f"The manifest at {source} does not parse: {type(exc).__name__}: {exc}.") from exc


def find_save_id(raw: bytes) -> str:
    """The save id in a manifest that may be damaged elsewhere; "" if it has none."""
    try:
        save_id = str(json.loads(raw)["manifest"]["save_id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return save_id if is_save_id(save_id) else ""


def _from_fields(fields: Mapping[str, Any]) -> Manifest:
    return Manifest(
        save_id=_text(fields["save_id"]),
        checkpoint_id=_text(fields["checkpoint_id"]),
        sequence=_count(fields["sequence"], SEQUENCE_MAX),
        created_unix_s=moment(fields["created_unix_s"]),
        world_size=_count(fields["world_size"]),
        copies=_count(fields["copies"]),
        metadata_bytes=_count(fields["metadata_bytes"]),
        metadata_crc32c=_count(fields["metadata_crc32c"], _U32),
        nodes=tuple(_node(node) for node in fields["nodes"]),
        shards={_shard_name(name): _shard(entry) for name, entry in fields["shards"].items()},
        upload=_upload(fields.get("upload")),
        lineage=_text(fields.get("lineage", "")),
        notes=check_notes(fields.get("notes", {})),
        divergences=tuple(_divergence(found) for found in fields.get("divergences", ())[:DIVERGENCES_MAX]),
        weights=_weights(fields.get("weights")),
        dropped=tuple(_text(name) for name in fields.get("dropped", ())),
    )


def _divergence(fields: Mapping[str, Any]) -> Divergence:
    groups = tuple(tuple(_count(rank) for rank in ranks) for ranks in fields["groups"])
    if len(groups) < 2 or not all(groups):
        raise ValueError(f"not a divergence: {groups!r}"[:200])
    return Divergence(
        _text(fields["fqn"]),
        tuple(_count(place) for place in fields["offset"]),
        _count(fields["first_byte"]),
        fields["is_object"] is True,
        _count(fields["saved_by"]),
        groups,
    )


def _upload(fields: Mapping[str, Any] | None) -> UploadEntry | None:
    if fields is None:
        return None
    return UploadEntry(
        _text(fields["url"]),
        fields["has_own_prefix"] is True,
        _count(fields["metadata_bytes"]),
        _count(fields["metadata_crc32c"], _U32),
        _text(fields.get("replaces", "")),
    )


def _weights(fields: Mapping[str, Any] | None) -> WeightsEntry | None:
    if fields is None:
        return None
    return WeightsEntry(
        _count(fields["local_bytes"]),
        _count(fields["crc32c"], _U32),
        _count(fields["bucket_bytes"]),
        _count(fields["bucket_crc32c"], _U32),
        tuple(_text(name) for name in fields["dropped"]),
    )


def _node(fields: Mapping[str, Any]) -> NodeEntry:
    domain = fields["domain"]
    return NodeEntry(
        _text(fields["node_id"]),
        _text(fields["host"]),
        None if domain is None else _text(domain),
        tuple(_count(rank) for rank in fields["ranks"]),
        _text(fields.get("boot_id", "")),
    )


def _shard(fields: Mapping[str, Any]) -> ShardEntry:
    return ShardEntry(
        _count(fields["size_bytes"]),
        _count(fields["crc32c"], _U32),
        _count(fields["owner_rank"]),
        _text(fields["owner_node"]),
        tuple(_text(node) for node in fields["holders"]),
    )


def _text(value: object) -> str:
    """A text for terminals and logs. Its author may be hostile, so control characters are escaped."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return one_line(value, _TEXT_CHARS_MAX)


def _count(value: object, maximum: int = 1 << 62) -> int:
    # True and 1.0 compare like integers: a forged field must not pass as a count.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise ValueError(f"expected a count up to {maximum}, found {value!r}")
    return value


def _shard_name(name: str) -> str:
    if ShardName.parse(name) is None:
        raise ValueError(f"{name!r} is not the name of a shard")
    return name


def _check(manifest: Manifest, source: str) -> Manifest:
    known = {node.node_id for node in manifest.nodes}
    problems: Sequence[str] = [
        *(["save_id"] if not is_save_id(manifest.save_id) else []),
        *([] if is_lineage(manifest.lineage) else ["lineage"]),
        *(["checkpoint_id"] if not is_checkpoint_id(manifest.checkpoint_id) else []),
        *(f"holders of {name}" for name, entry in manifest.shards.items() if not known.issuperset(entry.holders)),
        *(["upload"] if manifest.upload is not None and not _is_possible(manifest, manifest.upload) else []),
        *(["weights"] if manifest.weights is not None and not _is_part(manifest, manifest.weights) else []),
        *(f"owner of {name}" for name, entry in manifest.shards.items() if entry.owner_node not in known),
    ]
    if problems:
        raise ManifestInvalid(f"The manifest at {source} contradicts itself: {', '.join(problems)}.")
    return manifest


def _is_part(manifest: Manifest, weights: WeightsEntry) -> bool:
    """Whether the metadata for weights can be a part of the full metadata, and a shard is left without the optimizer."""
    upload = manifest.upload
    in_bucket = upload.metadata_bytes if upload is not None and upload.has_own_prefix else 0
    has_own = in_bucket > 0
    return (
        0 < weights.local_bytes < manifest.metadata_bytes - in_bucket
        and (0 < weights.bucket_bytes < in_bucket if has_own else weights.bucket_bytes == 0)
        and bool(weights.dropped)
        and not manifest.dropped
        and any(part_of_shard(name) is not Part.OPTIMIZER for name in manifest.shards)
    )


def _is_possible(manifest: Manifest, upload: UploadEntry) -> bool:
    """Whether the bucket's metadata equals the nodes' metadata, or can be a part of it."""
    if upload.has_own_prefix:
        return 0 < upload.metadata_bytes < manifest.metadata_bytes
    return (upload.metadata_bytes, upload.metadata_crc32c) == (manifest.metadata_bytes, manifest.metadata_crc32c)


NOTES_BYTES_MAX = 1 << 16
_KEYS = {"metrics", "metadata"}


class RefusedNotes(dict[str, Any]):
    """Invalid notes. A save with them raises `error` at a point where all of its ranks get the error."""

    def __init__(self, error: ConfigInvalid) -> None:
        super().__init__()
        self.error = error


def encode_notes(metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Notes in a manifest's form. Metrics are numbers or tensors of one element. Infinite values become NaN.

    Raises:
        ConfigInvalid: a metric is not a number, the metadata is not JSON, or both together are more than NOTES_BYTES_MAX.
    """
    try:
        numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
        notes: dict[str, Any] = {}
        if numbers:
            # JSON has no NaN: other readers of the manifest would refuse it.
            notes["metrics"] = {name: value if isfinite(value) else None for name, value in numbers.items()}
        if metadata:
            notes["metadata"] = json.loads(json.dumps(dict(metadata), allow_nan=False))
        return check_notes(notes)
    # RuntimeError: a tensor of several elements.
    except (AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as exc:
        raise ConfigInvalid(
            f"metrics and metadata cannot be stored with the checkpoint: {type(exc).__name__}: {exc}.",
            f"metrics are numbers by name; metadata is any JSON value. Together they may have {NOTES_BYTES_MAX} bytes.",
        ) from exc


def check_notes(notes: Any) -> Mapping[str, Any]:
    """The notes of a manifest, validated.

    Raises:
        ValueError, TypeError: the notes are invalid.
    """
    # Notes come from peers and buckets, too: their writer may be hostile.
    if not isinstance(notes, dict) or not notes.keys() <= _KEYS:
        raise ValueError(f"not valid notes: {str(notes)[:200]}")
    metrics, metadata = notes.get("metrics", {}), notes.get("metadata", {})
    if not isinstance(metrics, dict) or not isinstance(metadata, dict):
        raise TypeError("metrics and metadata must be dicts")
    for name, value in metrics.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value)):
            raise ValueError(f"metric {str(name)[:80]!r} is {str(value)[:80]}")
    size = len(json.dumps(notes))
    # Each node keeps and sends the manifest of every checkpoint.
    if size > NOTES_BYTES_MAX:
        raise ValueError(f"they have {size} bytes; at most {NOTES_BYTES_MAX} are stored")
    return notes


def metrics_of(notes: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in validated notes."""
    return {name: nan if value is None else float(value) for name, value in notes.get("metrics", {}).items()}
