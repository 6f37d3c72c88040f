"""The hand-over: an asynchronous save's shard goes to the node's agent as memory, and the agent does the rest."""
