"""Upkeep on this node: re-protection, scrub, retention."""
