"""The parts of a writer that outlive a save."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from replicated_ckpt.config import WriterConfig
from replicated_ckpt.dcp.agreement.alike import describe_wanted
from replicated_ckpt.dcp.agreement.decision import SavePost
from replicated_ckpt.dcp.memory.limit import MemoryLimit
from replicated_ckpt.dcp.node.node import register_alone, register_for_save
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayouts
from replicated_ckpt.dcp.runtime.caller import Line
from replicated_ckpt.dcp.runtime.gc_pause import Pause
from replicated_ckpt.dcp.save.bucket import ObjectTier
from replicated_ckpt.dcp.save.report import SaveReport
from replicated_ckpt.dcp.save.retention import Retaining
from replicated_ckpt.dcp.save.shard_writer import ShardWriter
from replicated_ckpt.stores.local.store import LocalStore


@dataclass(frozen=True)
class WriterParts:
    """The writer's settings, and the parts that work for each of its saves. `memory`: the limit of a store in memory.

    `planning`: the pause of collections while DCP plans a save. `name`: of this writer, among all.
    """

    config: WriterConfig
    store: LocalStore
    shards: ShardWriter
    layouts: CachedLayouts
    object_tier: ObjectTier
    retaining: Retaining
    made_at: Line | None
    on_save: Callable[[SaveReport], object] | None
    memory: MemoryLimit | None = None
    planning: Pause = field(default_factory=Pause)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def present(self, checkpoint_id: str | None, *, is_alone: bool) -> SavePost:
        """This rank's post before a save, with its node, whose agent runs by then."""
        node = (register_alone if is_alone else register_for_save)(self.store, self.config.domain)
        memory_bytes = None if self.memory is None else self.memory.measure(checkpoint_id)
        return SavePost(checkpoint_id, node, memory_bytes, describe_wanted(self.config))
