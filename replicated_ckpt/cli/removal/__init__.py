"""Verbs that remove checkpoints, or the optimizer of one. Only a node's own user can have its files removed."""
