"""What an agent keeps in ROOT/.agent: where it listens, its tokens and their rights, books of what it was told, its log."""
