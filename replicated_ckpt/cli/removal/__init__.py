"""Verbs that remove checkpoints. What lies on a node goes by the word of that node's own user alone."""
