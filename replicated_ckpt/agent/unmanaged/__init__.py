"""Checkpoints without a manifest, as agents find and adopt them."""
