"""What an agent keeps in ROOT/.agent."""
