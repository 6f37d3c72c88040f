"""Tensors as bytes of a shard, and back."""
