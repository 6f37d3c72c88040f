"""Which bytes a load reads, from which copy, and in which order."""
