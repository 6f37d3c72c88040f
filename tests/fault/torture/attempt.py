"""One attempted save of a schedule, and the nodes where its parts were seen."""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Attempt:
    """One attempted save. Times are counted in begins and ends of saves.

    `parts`: the parts of the checkpoint, once the save is decided. `nodes_by_part`: nodes where a part was seen, and
    not destroyed since. `published_by_part`: nodes where the part was seen under the checkpoint's name. `readable_on`:
    nodes with a directory of the save that has the original manifest. `saw`: earlier attempts at the same checkpoint
    that lay on the save's nodes when it began, and the attempts that those saw. `is_blind`: no manifest of its run lay
    on its nodes. `removed_on`: nodes where an operator removed the save. `was_removed`: an operator removed it
    somewhere, perhaps on a disk that is lost by now. `is_spoilt`: a file of stock torch was damaged, and no checksum
    can show it.
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
        """Whether each part was seen on a disk and not destroyed since. With `nodes`: whether each part is published on
        them and readable now.
        """
        if nodes is None:
            return bool(self.parts) and all(self.nodes_by_part[part] for part in self.parts)
        able = set(nodes) & self.readable_on
        return bool(self.parts) and all(self.published_by_part[part] & able for part in self.parts)

    def is_ahead_of(self, other: "Attempt") -> bool:
        """Whether this attempt has a higher sequence number in the same run. Nodes behind a partition may have saved
        more often.
        """
        return self.lineage == other.lineage and self.sequence > other.sequence
