"""Findings: the defects that a full read of the stores detects, as values for tables, JSON and repair."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from replicated_ckpt.wording import one_line


class Problem(Enum):
    CORRUPT = "corrupt"
    """Its bytes differ from the checksum of the save."""
    MISSING = "missing"
    """The node is an intended holder and lacks the file."""
    UNKNOWN = "unknown"
    """The manifest of its checkpoint does not name the file."""


@dataclass(frozen=True)
class Finding:
    """One defective file on one node. `save_id` is empty if the manifest itself is invalid."""

    node_id: str
    checkpoint_id: str
    save_id: str
    name: str
    path: str
    problem: Problem
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.problem.value}: {self.path} on node {self.node_id}: expected {self.expected}, found {self.found}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problem": self.problem.value}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Finding":
        """Raises ValueError, KeyError, TypeError: the fields are no finding; the caller names the peer."""
        names = ("node_id", "checkpoint_id", "save_id", "name", "path", "expected", "found")
        text = {name: one_line(fields[name]) for name in names}
        return cls(**text, problem=Problem(fields["problem"]))
