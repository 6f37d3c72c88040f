"""Contracts for your own tier, as pytest classes to inherit from, and reference implementations in memory.

Only this package needs pytest, and no other package imports it. See docs/own-tier.md.
"""

import pytest

# Before the imports: pytest rewrites a module's asserts at its import, so that they print the compared values.
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
