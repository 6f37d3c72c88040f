"""Saves on this node: opened, received, handed over, committed, given up, and settled after a crash."""
