"""The store of one node: intents, staged saves, committed checkpoints."""
