"""What only an agent keeps in ROOT/.agent: where it listens, its tokens and their rights, its log."""
