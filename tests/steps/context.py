"""The context of a step: its rank, its node and store, and this process's writer and readers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicated_ckpt import ReplicatedReader, ReplicatedWriter


@dataclass
class Context:
    rank: int
    world_size: int
    node: int
    roots: list[Path]
    kept: dict[str, Any] = field(default_factory=dict)  # left by a step for a later one
    leaves_work_behind: bool = False  # a save is in flight: the process group must outlive the last step

    @property
    def root(self) -> Path:
        return self.roots[self.node]

    def writer(self, **options: Any) -> ReplicatedWriter:
        """The writer with these options. Like a training loop, every call returns the same object."""
        key = f"writer {sorted(options.items())}"
        if key not in self.kept:
            self.kept[key] = ReplicatedWriter(self.root, **options)
        return self.kept[key]  # type: ignore[no-any-return]

    def reader(self, **options: Any) -> ReplicatedReader:
        return ReplicatedReader(self.root, **options)
