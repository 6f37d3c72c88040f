"""Finding this node's agent, or starting it."""
