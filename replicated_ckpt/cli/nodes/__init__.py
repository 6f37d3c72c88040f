"""Verbs about nodes: run an agent, show their state, drain and forget them."""
