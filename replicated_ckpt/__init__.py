"""The public interface: a replicated, fault-tolerant storage backend for PyTorch Distributed Checkpoint.

Importing this package does not import torch: the agent and most CLI verbs run without it. The writer and the reader import
torch on first use.
"""

from typing import TYPE_CHECKING

from replicated_ckpt.errors import (
    AckNotReached,
    AgentUnavailable,
    CheckpointAmbiguous,
    CheckpointExists,
    CheckpointIdMismatch,
    CheckpointNotCommitted,
    CheckpointNotFound,
    CheckpointRejected,
    ConfigInvalid,
    LatestAmbiguous,
    LineagesMet,
    ManagerClosed,
    ManifestInvalid,
    ManifestVersionUnknown,
    MetadataUnsafe,
    ObjectCorrupt,
    ObjectMissing,
    ObjectUnsafe,
    OptimizerDropped,
    PeerProtocolError,
    RankFailed,
    RendezvousFailed,
    ReplicasDiverged,
    ReplicatedCkptError,
    ReplicatedCkptWarning,
    SaveAborted,
    SaveSuperseded,
    ShardLost,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UploadFailed,
)
from replicated_ckpt.version import __version__

if TYPE_CHECKING:
    from replicated_ckpt.config import Retention
    from replicated_ckpt.core.key_rules import KeyRules
    from replicated_ckpt.dcp.convert.export import export_checkpoint
    from replicated_ckpt.dcp.convert.importing import import_checkpoint
    from replicated_ckpt.dcp.convert.source import Converted
    from replicated_ckpt.dcp.load.load_report import LoadReport
    from replicated_ckpt.dcp.load.reader import ReplicatedReader
    from replicated_ckpt.dcp.manager import CheckpointManager
    from replicated_ckpt.dcp.memory.root import MemoryTierShort
    from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner, PlansUnknown
    from replicated_ckpt.dcp.rank_state.rank_state import RankState, RankStatePlanner, WorldSizeChanged
    from replicated_ckpt.dcp.rank_state.replay import ReplayedLoader
    from replicated_ckpt.dcp.save.save_report import SaveReport
    from replicated_ckpt.dcp.save.writer import ReplicatedWriter

__all__ = [
    "AckNotReached",
    "AgentUnavailable",
    "CachedSavePlanner",
    "CheckpointAmbiguous",
    "CheckpointExists",
    "CheckpointIdMismatch",
    "CheckpointManager",
    "CheckpointNotCommitted",
    "CheckpointNotFound",
    "CheckpointRejected",
    "ConfigInvalid",
    "Converted",
    "KeyRules",
    "LatestAmbiguous",
    "LineagesMet",
    "LoadReport",
    "ManagerClosed",
    "ManifestInvalid",
    "ManifestVersionUnknown",
    "MemoryTierShort",
    "MetadataUnsafe",
    "ObjectCorrupt",
    "ObjectMissing",
    "ObjectUnsafe",
    "OptimizerDropped",
    "PeerProtocolError",
    "PlansUnknown",
    "RankFailed",
    "RankState",
    "RankStatePlanner",
    "RendezvousFailed",
    "ReplayedLoader",
    "ReplicasDiverged",
    "ReplicatedCkptError",
    "ReplicatedCkptWarning",
    "ReplicatedReader",
    "ReplicatedWriter",
    "Retention",
    "SaveAborted",
    "SaveReport",
    "SaveSuperseded",
    "ShardLost",
    "StoreDenied",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "UploadFailed",
    "WorldSizeChanged",
    "__version__",
    "export_checkpoint",
    "import_checkpoint",
]

_HOME_BY_NAME = {
    "CachedSavePlanner": "replicated_ckpt.dcp.planning.cached_plan",
    "CheckpointManager": "replicated_ckpt.dcp.manager",
    "Converted": "replicated_ckpt.dcp.convert.source",
    "KeyRules": "replicated_ckpt.core.key_rules",
    "LoadReport": "replicated_ckpt.dcp.load.load_report",
    "MemoryTierShort": "replicated_ckpt.dcp.memory.root",
    "PlansUnknown": "replicated_ckpt.dcp.planning.cached_plan",
    "RankState": "replicated_ckpt.dcp.rank_state.rank_state",
    "RankStatePlanner": "replicated_ckpt.dcp.rank_state.rank_state",
    "ReplayedLoader": "replicated_ckpt.dcp.rank_state.replay",
    "ReplicatedReader": "replicated_ckpt.dcp.load.reader",
    "ReplicatedWriter": "replicated_ckpt.dcp.save.writer",
    "Retention": "replicated_ckpt.config",
    "SaveReport": "replicated_ckpt.dcp.save.save_report",
    "WorldSizeChanged": "replicated_ckpt.dcp.rank_state.rank_state",
    "export_checkpoint": "replicated_ckpt.dcp.convert.export",
    "import_checkpoint": "replicated_ckpt.dcp.convert.importing",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_BY_NAME[name]), name)
