"""Which bytes a load reads, from where, in which order."""
