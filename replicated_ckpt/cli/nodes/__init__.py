"""Verbs about nodes: how they are, and which are waited for."""
