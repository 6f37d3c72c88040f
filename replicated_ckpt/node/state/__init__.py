"""State of a node in ROOT/.agent: policies, damage, uploads and sequences."""
