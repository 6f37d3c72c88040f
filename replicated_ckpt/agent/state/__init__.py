"""State in ROOT/.agent that only an agent uses: where it listens, its tokens and their rights, its log."""
