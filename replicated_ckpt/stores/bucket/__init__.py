"""Checkpoints in a bucket: their shards, commit, removal and inspection."""
