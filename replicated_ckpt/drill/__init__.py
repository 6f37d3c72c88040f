"""Simulates nodes on one machine, kills some of them, and checks the resumed job. Only `job` imports torch."""
