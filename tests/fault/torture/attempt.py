"""One save of a schedule, and where its parts were seen."""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Attempt:
    """One save that was tried. Times count the beginnings and ends of saves. `parts`: what it consists of, once decided.

    `nodes_by_part`: where the part was seen and not destroyed since; `published_by_part`: under its checkpoint's name.
    `readable_on`: nodes that have a directory of it with the manifest that was written. `saw`: the attempts at the same
    checkpoint that lay on its nodes when it began, and those that they saw. `is_blind`: no manifest of its run lay there.
    `removed_on`: nodes whose users have removed it by hand; `was_removed`: one has, of whose disk it may be gone with.
    `is_spoilt`: a file of stock torch's was damaged, and has no checksum that tells.
    """

    number: int
    checkpoint_id: str
    ranks: int
    run: str
    began: int
    is_stock: bool = False
    ended: int | None = None
    is_acknowledged: bool = False
    save_id: str = ""
    parts: dict[str, str] = field(default_factory=dict)
    nodes_by_part: dict[str, set[int]] = field(default_factory=dict)
    published_by_part: dict[str, set[int]] = field(default_factory=dict)
    readable_on: set[int] = field(default_factory=set)
    lineage: str = ""
    sequence: int = 0
    saw: frozenset[int] = frozenset()
    met: frozenset[int] = frozenset()
    is_blind: bool = False
    was_whole: bool = False
    is_spoilt: bool = False
    is_in_bucket: bool = False
    copies: int = 1
    removed_on: set[int] = field(default_factory=set)
    was_removed: bool = False

    def has_all_parts(self, nodes: Collection[int] | None = None) -> bool:
        """Whether each part was seen on a disk and not destroyed since; on `nodes`: published there, and readable now."""
        if nodes is None:
            return bool(self.parts) and all(self.nodes_by_part[part] for part in self.parts)
        able = set(nodes) & self.readable_on
        return bool(self.parts) and all(self.published_by_part[part] & able for part in self.parts)

    def is_ahead_of(self, other: "Attempt") -> bool:
        """Whether it has a higher number in the same run: nodes that were cut off may have saved more often by then."""
        return self.lineage == other.lineage and self.sequence > other.sequence
