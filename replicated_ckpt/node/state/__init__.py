"""What a node keeps in ROOT/.agent: policies, damage, uploads and sequences."""
