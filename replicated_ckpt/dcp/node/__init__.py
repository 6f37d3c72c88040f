"""This rank's node: its address, its agent, what it has seen."""
