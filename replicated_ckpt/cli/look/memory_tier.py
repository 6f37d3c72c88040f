"""The memory tier of a store, in a line for a look at the disk alone."""

from shlex import quote

from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.local.memory_tier import find_memory_tier
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import plural


def describe_memory_tier(store: LocalStore) -> list[str]:
    """What this node's memory tier has; no line where no job has used one. Other nodes' tiers are not asked."""
    try:
        root = find_memory_tier(store)
        if root is None:
            return []
        tier = LocalStore(root)
        held = tier.catalog.holdings(tier.read_node_id())
    except ReplicatedCkptError as exc:
        return [f"memory tier: it cannot be looked at: {exc.message}"]
    if not held:
        return [f"memory tier at {root}: nothing is there on this node"]
    newest = max(held, key=lambda each: (each.created_unix_s, each.sequence))
    count = plural(len(held), "checkpoint")
    found = f"{count} on this node, the newest {newest.checkpoint_id}"
    return [f"memory tier at {root}: {found}; `replicated-ckpt ls --root {quote(str(root))}` asks all nodes"]
