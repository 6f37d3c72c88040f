"""Saves on this node: opened, received, submitted, committed, aborted, settled after a crash, and collected."""
