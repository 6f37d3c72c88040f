"""The intent: what a save that is not committed yet is about."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Intent:
    """One attempt at one save; lies beside its staging directory."""

    save_id: str
    checkpoint_id: str
    session: str
    overwrite: bool
    adopts: bool = False
    """It replaces, with its own bytes, a checkpoint that stock torch wrote."""

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, save_id: str, path: Path) -> "Intent":
        """The intent at `path`; one that names no checkpoint if it cannot be believed."""
        try:
            fields = json.loads(path.read_bytes())
            adopts = bool(fields.get("adopts", False))
            return cls(save_id, str(fields["checkpoint_id"]), str(fields["session"]), bool(fields["overwrite"]), adopts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(save_id, "", "", overwrite=False)
