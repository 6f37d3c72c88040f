"""The store of one node: staged saves and committed checkpoints, shard files, and a look at all of it."""
