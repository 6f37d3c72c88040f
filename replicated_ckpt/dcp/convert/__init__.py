"""Conversions: checkpoints out into other formats, and in from them, without ever holding a model in memory."""
