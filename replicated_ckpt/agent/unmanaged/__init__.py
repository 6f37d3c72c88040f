"""Checkpoints without a manifest, as agents find and check them."""
