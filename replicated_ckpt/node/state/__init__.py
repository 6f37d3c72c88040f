"""State of a node in ROOT/.agent: policies, marks, damage, uploads, sequences, and the reports of its ranks."""
