"""Objects in shards, made without running their code."""
