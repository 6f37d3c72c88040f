"""Which checkpoint a load reads, and where its files are."""
