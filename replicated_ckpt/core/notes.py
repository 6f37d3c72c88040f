"""Notes: a user's metrics and small metadata of a checkpoint, stored in its manifest."""

import json
from collections.abc import Mapping
from math import isfinite, nan
from typing import Any

from replicated_ckpt.errors import ConfigInvalid

NOTES_BYTES_MAX = 1 << 16
_KEYS = {"metrics", "metadata"}


class RefusedNotes(dict[str, Any]):
    """Invalid notes. A save with them raises `error` at a point where all of its ranks get the error."""

    def __init__(self, error: ConfigInvalid) -> None:
        super().__init__()
        self.error = error


def encode_notes(metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Notes in a manifest's form. Metrics are numbers or tensors of one element. Infinite ones and NaN become NaN.

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
        raise ValueError(f"no notes: {str(notes)[:200]}")
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
