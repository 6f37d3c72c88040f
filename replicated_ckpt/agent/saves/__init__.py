"""Saves on this node: opened, received, committed, settled."""
