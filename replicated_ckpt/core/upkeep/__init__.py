"""Rules that keep checkpoints complete, or retire them: repair, retention, uploads."""
