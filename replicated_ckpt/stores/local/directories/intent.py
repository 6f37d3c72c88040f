"""The intent: the description of a save that is not committed yet."""

import hmac
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX, is_lineage
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.stores.files.durable import raise_shortage, translate_errors, write_all
from replicated_ckpt.stores.files.existence import closing_fd, read_plain
from replicated_ckpt.wording import one_line


@dataclass(frozen=True)
class Announced:
    """Announced upper bounds, in bytes: of each shard, and of all shards of a save together. 0: none is announced."""

    shard_bytes_max: int = 0
    save_bytes_max: int = 0

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Announced":
        """The announcement in `fields`. Raises TypeError, ValueError: the fields are not an announcement."""
        found = cls(index(fields.get("shard_bytes_max", 0)), index(fields.get("save_bytes_max", 0)))
        if found.shard_bytes_max < 0 or found.save_bytes_max < 0:
            raise ValueError(f"no save has {min(found.shard_bytes_max, found.save_bytes_max)} bytes")
        return found


NOTHING_ANNOUNCED = Announced()


WRITER = "//"
"""Separates the two parts of a session: one that all saves of a process share, and the name of a lone writer."""


@dataclass(frozen=True)
class Intent:
    """One attempt at one save. Its file lies beside the staging directory.

    `nodes` are all nodes of the save; `coordinator` is the node whose store has the decision before any other.
    `replaces` is the save that was published under the id here when this one was opened.
    """

    save_id: str
    checkpoint_id: str
    session: str
    overwrite: bool
    nodes: tuple[str, ...] = ()
    coordinator: str = ""
    replaces: str = ""
    announced: Announced = NOTHING_ANNOUNCED
    """Bounds on the files that peers may send for it."""
    ticket: str = field(default="", repr=False)
    """A secret of the save's nodes and ranks: it authorizes them to abort the save."""
    place: Version | None = None
    """Its lineage and sequence, once a rank of this node has noted them. Its time is unknown before the decision."""

    def admits(self, ticket: str) -> bool:
        """Whether the ticket proves that the sender takes part in this save."""
        # An intent without a ticket admits no sender. The comparison takes the same time for every guess.
        return bool(self.ticket) and hmac.compare_digest(self.ticket.encode(), ticket.encode())

    def encode(self) -> bytes:
        """The first line of the file, without the place."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "place"}).encode() + b"\n"

    @classmethod
    def read_intent(cls, save_id: str, path: Path) -> "Intent":
        """The intent at `path`; one without a checkpoint id if the file is missing or damaged.

        Raises:
            StoreError: the process is out of descriptors or memory, which is no evidence of damage.
        """
        try:
            return cls._read(save_id, path)
        except OSError as exc:
            raise_shortage(exc, path)
            return cls(save_id, "", "", overwrite=False)

    @classmethod
    def _read(cls, save_id: str, path: Path) -> "Intent":
        """As `read_intent`. Raises OSError: the file exists, and cannot be read."""
        try:
            first, *more = read_plain(path).splitlines()
            fields = json.loads(first)
            intent = cls(
                save_id,
                one_line(fields["checkpoint_id"]),
                str(fields["session"]),
                bool(fields["overwrite"]),
                tuple(map(one_line, fields.get("nodes", ()))),
                str(fields.get("coordinator", "")),
                str(fields.get("replaces", "")),
                announced=Announced.from_json(fields.get("announced", {})),
                ticket=str(fields.get("ticket", "")),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return cls(save_id, "", "", overwrite=False)
        return replace(intent, place=_find_place(save_id, more))

    @classmethod
    def admits_at(cls, save_id: str, path: Path, ticket: str) -> bool:
        """As `admits`, for the intent at `path`.

        Raises:
            StoreError: it cannot be read. The sender must not be treated as unauthenticated then.
        """
        with translate_errors(str(path.parent), "read", path.name):
            return cls._read(save_id, path).admits(ticket)


def note_place(path: Path, lineage: str, sequence: int) -> None:
    """Appends the place of an open save to its intent, so that saves opened from then on get larger sequences.

    It appends, because ranks lock this file itself. If the line does not survive a power loss, the coordinators' clocks
    decide. Several ranks may call it at once.
    """
    with closing_fd(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
        write_all(fd, json.dumps({"lineage": lineage, "sequence": sequence}).encode() + b"\n")


def _find_place(save_id: str, lines: Iterable[bytes]) -> Version | None:
    """The place in the first line that is complete; a crash may have torn others."""
    for line in lines:
        try:
            fields = json.loads(line)
            lineage, sequence = str(fields["lineage"]), index(fields["sequence"])
        except (ValueError, KeyError, TypeError):
            continue
        if is_lineage(lineage) and 0 <= sequence <= SEQUENCE_FLOOR_MAX:
            return Version(lineage, sequence, math.inf, save_id)
    return None
