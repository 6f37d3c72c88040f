"""Names on disk: the files and directories under a root, and the checks of names from other processes."""

import re
from dataclasses import dataclass
from pathlib import PurePath
from posixpath import normpath, relpath

from replicated_ckpt.errors import ConfigInvalid

METADATA_NAME = ".metadata"
MANIFEST_NAME = ".manifest.json"
NODE_NAME = "node.json"
STAGING_DIR = ".staging"
RECYCLED_DIR = ".recycled"
"""Files of removed checkpoints, which the next save overwrites. They are no checkpoint."""
ROOM_NAME = ".room"
"""Name of a reserve file; with ".1" that of a second one. They are removed when an agent starts on a full disk."""
QUARANTINE_DIR = ".quarantine"
AGENT_DIR = ".agent"
SHARD_SUFFIX = ".distcp"
PART_SUFFIX = ".part"
"""Suffix of a file that is being written."""
LATEST = "latest"
OBJECT_NODE = "object-store"
"""Stands for the object tier in place of a node's id, in holdings and in orders of sources."""

SEQUENCE_MAX = 1 << 62
SEQUENCE_FLOOR_MAX = 1 << 53
"""Largest sequence that is accepted from another node. The numbers up to SEQUENCE_MAX are left for later saves."""

SHARD_INDEX_MAX = 999_999_999
"""The largest number after the rank in the name of a shard."""

_SHARD = re.compile(r"__(0|[1-9][0-9]{0,8})_(0|[1-9][0-9]{0,8})\.distcp")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_MARKED = re.compile(r"\.(replaced|gone)\.([0-9a-f]{32})\.json")
_UNFINISHED = re.compile(r"(.+?)(\.[0-9a-f]{32})?((\.part)+(\.[0-9]+\.tmp)?|\.[0-9]+\.tmp)")
_STEP = re.compile(r"(?:^|[^0-9])([0-9]{1,18})$")
_LINEAGE = re.compile(r"[0-9a-f]{16}")
_PART_BYTES_MAX = 200
_ID_BYTES_MAX = 512
PARTS_MAX = 8
"""Largest number of parts of a checkpoint id, and so the depth to which a root or bucket is searched for checkpoints."""
_NOT_IN_NAMES = frozenset('*?[]{}<>|"`\\^%$')
"""Patterns, quotes and escapes, which shells, URLs and clients of object stores interpret."""
_NOT_FIRST = " .-~"


@dataclass(frozen=True)
class ShardName:
    """Name of one `.distcp` file. Rank is the rank within the saving process group, as DCP numbers it."""

    rank: int
    index: int

    def __str__(self) -> str:
        return f"__{self.rank}_{self.index}{SHARD_SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> "ShardName | None":
        match = _SHARD.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


def is_shard_path(text: str) -> bool:
    """Whether metadata may place an item at this path: a shard, in a bucket also a shard under a save's prefix."""
    prefix, _, name = text.rpartition("/")
    return ShardName.parse(name) is not None and (prefix == "" or is_save_id(prefix)) and not text.startswith("/")


def replaced_name(save_id: str) -> str:
    """Name of the manifest of a replaced version, next to the manifest of the published one."""
    return f".replaced.{save_id}.json"


def gone_name(save_id: str) -> str:
    """Name of the manifest of a version whose removal has begun. The version no longer counts as a checkpoint."""
    return f".gone.{save_id}.json"


def version_metadata_name(save_id: str) -> str:
    """Name of the metadata of a version that is replaced or being published, while another one has `.metadata`."""
    return f"{METADATA_NAME}.{save_id}"


def parse_version_metadata(name: str) -> str:
    """The save id in a name of `version_metadata_name`; "" for any other name."""
    save_id = name.removeprefix(f"{METADATA_NAME}.")
    return save_id if save_id != name and is_save_id(save_id) else ""


def parse_marked(name: str) -> tuple[str, str] | None:
    """("replaced" or "gone", save id) from a name of `replaced_name` or `gone_name`; None for any other name."""
    match = _MARKED.fullmatch(name)
    return (match[1], match[2]) if match else None


def is_unfinished(name: str) -> bool:
    """Whether the name is that of a half-written file of a checkpoint, as a killed process leaves it."""
    match = _UNFINISHED.fullmatch(name)
    return match is not None and (is_checkpoint_file(match[1]) or parse_marked(match[1]) is not None)


def is_ours(name: str) -> bool:
    """Whether a file of this name in a checkpoint's directory belongs to a version, complete or half-written."""
    is_marked = parse_marked(name) is not None or bool(parse_version_metadata(name))
    return is_checkpoint_file(name) or is_unfinished(name) or is_marked


def find_step(checkpoint_id: str) -> int | None:
    """The number at the end of an id, such as 100 of `step-100`; None: it ends with none."""
    found = _STEP.search(checkpoint_id)
    return int(found[1]) if found else None


def is_save_id(text: str) -> bool:
    return _SAVE_ID.fullmatch(text) is not None


def is_lineage(text: str) -> bool:
    """Whether `text` is a lineage: 16 hexadecimal digits, or "" for saves without a lineage."""
    return text == "" or _LINEAGE.fullmatch(text) is not None


def is_checkpoint_file(name: str) -> bool:
    """Whether a peer may read or write a file of this name in a checkpoint. Agents serve no other names."""
    # An allow-list: agents serve and store files for peers, which must reach nothing else under the root.
    return name in (METADATA_NAME, MANIFEST_NAME) or ShardName.parse(name) is not None


def is_checkpoint_id(text: str) -> bool:
    """Whether `text` is a name under a root: one or more plain path parts, none hidden, none leading upwards."""
    return (
        text.isprintable()
        and 0 < len(text.encode()) <= _ID_BYTES_MAX
        and not _is_reserved(text)
        # Deeper ids would be saved, and no listing would find them.
        and text.count("/") < PARTS_MAX
        and all(map(_is_plain_part, text.split("/")))
    )


def _is_reserved(text: str) -> bool:
    # `latest` asks for the newest checkpoint, and node.json is the store's identity.
    return text == NODE_NAME or text.rpartition("/")[2] == LATEST


def check_checkpoint_id(text: str) -> str:
    """Returns `text`. Raises ConfigInvalid if it is not a checkpoint id."""
    if not is_checkpoint_id(text):
        raise ConfigInvalid(f"{text[:200]!r} is not a valid checkpoint id.")
    return text


def _is_plain_part(part: str) -> bool:
    """Whether the part names the same directory everywhere: on disk, in a URL, a key or a command."""
    return (
        0 < len(part.encode()) <= _PART_BYTES_MAX
        and part[0] not in _NOT_FIRST  # hides it, looks like an option, or leads upwards ("..")
        and part[-1] != " "
        and _NOT_IN_NAMES.isdisjoint(part)
        # A directory of that name would look like a shard of the checkpoint above it.
        and not part.endswith(SHARD_SUFFIX)
    )


def _describe_refusal(text: str) -> str:
    """The reason why `text` is not a checkpoint id, for an error text."""
    if not text.isprintable() or len(text.encode()) > _ID_BYTES_MAX or _is_reserved(text):
        taken = "the name is reserved" if _is_reserved(text) else f"it has more than {_ID_BYTES_MAX} bytes"
        return taken if text.isprintable() else "it contains a control character"
    if text.count("/") >= PARTS_MAX:
        return f"it has more than {PARTS_MAX} parts"
    part = next(part for part in text.split("/") if not _is_plain_part(part))
    bad = sorted(_NOT_IN_NAMES.intersection(part))
    if not part:
        return "it is empty"
    if part[0] in _NOT_FIRST or part[-1] == " ":
        return f"{part!r} starts with {part[0]!r}" if part[0] in _NOT_FIRST else f"{part!r} ends with a space"
    if bad:
        return f"{part!r} contains {' '.join(bad)}"
    return f"{part!r} ends like a shard name" if part.endswith(SHARD_SUFFIX) else f"{part!r} is too long"


def checkpoint_id_under(root: str, given: str) -> str:
    """The checkpoint id that `given` means: a relative name, or an absolute path inside `root`.

    Empty parts and `.` are left out, as in any path: `./run//step-1/` is `run/step-1`.

    Raises:
        ConfigInvalid: the name is empty, leaves the root, or has parts that are no plain names.
    """
    text = given
    if PurePath(text).is_absolute():
        relative = relpath(normpath(text), normpath(root))
        if PurePath(relative).parts[:1] in (("..",), ()):
            raise ConfigInvalid(
                f"checkpoint_id {text!r} is not inside the root {root!r}.",
                "Pass a name under the root, such as step-10; the root is the directory of all checkpoints.",
            )
        text = relative
    text = "/".join(part for part in text.split("/") if part not in ("", "."))
    if not is_checkpoint_id(text):
        raise ConfigInvalid(
            f"checkpoint_id {given!r} is not a valid name under {root!r}: {_describe_refusal(text)}.",
            "A part must not start with . - ~ or a space, end with a space, contain a control character or one of "
            f"{' '.join(sorted(_NOT_IN_NAMES))}, or have more than {_PART_BYTES_MAX} bytes. An id has at most "
            f"{PARTS_MAX} parts. 'latest' is reserved, in each directory.",
        )
    return text
