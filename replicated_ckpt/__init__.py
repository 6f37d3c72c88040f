"""The front door: a replicated, fault-tolerant storage backend for PyTorch Distributed Checkpoint.

Importing this package does not import torch (the agent and most CLI verbs run without it); the writer and the reader do,
on first use.
"""

from typing import TYPE_CHECKING

from replicated_ckpt.version import __version__

if TYPE_CHECKING:
    from replicated_ckpt.config import Retention
    from replicated_ckpt.dcp.checkpointing import CheckpointManager
    from replicated_ckpt.dcp.reader import ReplicatedReader
    from replicated_ckpt.dcp.report import LoadReport, SaveReport
    from replicated_ckpt.dcp.writer import ReplicatedWriter

__all__ = [
    "CheckpointManager",
    "LoadReport",
    "ReplicatedReader",
    "ReplicatedWriter",
    "Retention",
    "SaveReport",
    "__version__",
]

_HOME_BY_NAME = {
    "CheckpointManager": "replicated_ckpt.dcp.checkpointing",
    "LoadReport": "replicated_ckpt.dcp.report",
    "ReplicatedReader": "replicated_ckpt.dcp.reader",
    "ReplicatedWriter": "replicated_ckpt.dcp.writer",
    "Retention": "replicated_ckpt.config",
    "SaveReport": "replicated_ckpt.dcp.report",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_BY_NAME[name]), name)
