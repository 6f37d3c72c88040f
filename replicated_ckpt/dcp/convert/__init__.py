"""Conversions of checkpoints to and from other formats, without a whole model in memory."""
