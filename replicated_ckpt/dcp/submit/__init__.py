"""Submission: the node's agent gets an asynchronous save's shard as memory, and does the rest."""
