"""What is another on each rank: random states and the position in the data. Saved with a checkpoint, rank by rank."""
