"""Places: where a staged save stands among others, noted by its ranks before any decision is known here."""

import contextlib
import json
import math
from operator import index
from pathlib import Path

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX, STAGING_DIR, is_lineage, is_save_id
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.plain import read_plain
from replicated_ckpt.stores.files.shortage import raise_shortage
from replicated_ckpt.stores.local.versions.recycled import write_with_room

_SUFFIX = ".place.json"


class PlaceNotes:
    """The notes under one root; each goes with its save's intent. Safe to use from several processes."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def note(self, save_id: str, lineage: str, sequence: int) -> None:
        """Keeps the place of an open save, so that saves which are opened meanwhile are newer.

        It need not survive a power loss: then the coordinators' clocks decide.
        """
        path = self._root / STAGING_DIR / f"{save_id}{_SUFFIX}"
        raw = json.dumps({"lineage": lineage, "sequence": sequence}).encode()
        with translate_errors(str(self._root), "write", path.name), contextlib.suppress(FileNotFoundError):
            write_with_room(self._root, path, raw, is_flushed=False)

    def read_all(self) -> dict[str, Version]:
        """The places of staged saves, by save id. One that cannot be read is left out.

        Raises:
            StoreError: no file can be read now, for want of descriptors or memory.
        """
        places = {}
        for path in (self._root / STAGING_DIR).glob(f"*{_SUFFIX}"):
            save_id = path.name.removesuffix(_SUFFIX)
            try:
                fields = json.loads(read_plain(path))
                lineage, sequence = str(fields["lineage"]), index(fields["sequence"])
            except OSError as exc:
                raise_shortage(exc, path)
            except (ValueError, KeyError, TypeError):
                continue
            else:
                if is_save_id(save_id) and is_lineage(lineage) and 0 <= sequence <= SEQUENCE_FLOOR_MAX:
                    places[save_id] = Version(lineage, sequence, math.inf, save_id)
        return places
