"""Saves on this node: opened, received, handed over, committed, given up."""
