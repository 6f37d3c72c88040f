"""Verbs that bring checkpoints into other formats and back."""
