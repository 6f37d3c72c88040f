"""Contracts that a tier of your own must keep, as pytest classes to inherit from, and a reference in memory.

Only this room needs pytest, and no other room imports it. See docs/own-tier.md.
"""

import pytest

# Before the imports: pytest rewrites a module's asserts, which print what they compare, only at its import.
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("object_clients", "shards")))

from replicated_ckpt.testing.memory import MemoryClient, MemoryShard, MemorySink  # noqa: E402
from replicated_ckpt.testing.object_clients import ObjectClientContract, RawObjects  # noqa: E402
from replicated_ckpt.testing.shards import ShardContract, SinkContract  # noqa: E402

__all__ = [
    "MemoryClient",
    "MemoryShard",
    "MemorySink",
    "ObjectClientContract",
    "RawObjects",
    "ShardContract",
    "SinkContract",
]
