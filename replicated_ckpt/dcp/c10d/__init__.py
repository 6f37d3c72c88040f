"""What ranks tell each other over the c10d store."""
