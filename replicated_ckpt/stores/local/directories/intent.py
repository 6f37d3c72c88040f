"""The intent: what a save that is not committed yet is about."""

import hmac
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from replicated_ckpt.core.one_line import one_line
from replicated_ckpt.core.protocol.announced import NOTHING_ANNOUNCED, Announced
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.plain import read_plain
from replicated_ckpt.stores.files.shortage import raise_shortage

WRITER = "//"
"""In a session, before the name of a writer that saves alone. All saves of its process have the same before it."""


@dataclass(frozen=True)
class Intent:
    """One attempt at one save; lies with its staging directory.

    `nodes` are all nodes of the save, `coordinator` the one whose store has the decision before any other.
    `replaces` is the save that lay under the name here when this one was opened.
    """

    save_id: str
    checkpoint_id: str
    session: str
    overwrite: bool
    nodes: tuple[str, ...] = ()
    coordinator: str = ""
    replaces: str = ""
    announced: Announced = NOTHING_ANNOUNCED
    """What peers may bring of it."""
    ticket: str = field(default="", repr=False)
    """Only the nodes and ranks of the save have it: those that may give it up."""

    def admits(self, ticket: str) -> bool:
        """Whether it shows that the sender takes part in this save."""
        return bool(self.ticket) and hmac.compare_digest(self.ticket.encode(), ticket.encode())

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, save_id: str, path: Path) -> "Intent":
        """The intent at `path`; one that names no checkpoint if it cannot be believed.

        Raises:
            StoreError: the system reads no file now, for want of descriptors or memory. That says nothing of this one.
        """
        try:
            return cls._read(save_id, path)
        except OSError as exc:
            raise_shortage(exc, path)
            return cls(save_id, "", "", overwrite=False)

    @classmethod
    def _read(cls, save_id: str, path: Path) -> "Intent":
        """Raises OSError: it is there, and cannot be read."""
        try:
            fields = json.loads(read_plain(path))
            return cls(
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

    @classmethod
    def admits_at(cls, save_id: str, path: Path, ticket: str) -> bool:
        """As `admits`, of the intent at `path`.

        Raises:
            StoreError: it cannot be read, which is no reason to take the sender for a stranger.
        """
        with translate_errors(str(path.parent), "read", path.name):
            return cls._read(save_id, path).admits(ticket)
