"""State in ROOT/.agent that only an agent writes: where it listens, its tokens and their rights, its log."""
