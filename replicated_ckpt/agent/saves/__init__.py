"""Saves on this node: opened, received, submitted, committed, aborted, and settled after a crash."""
