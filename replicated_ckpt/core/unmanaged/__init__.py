"""Checkpoints without a manifest, as FileSystemWriter writes them."""
