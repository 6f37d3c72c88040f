"""State that differs by rank, random states and the position in the data, saved with a checkpoint."""
