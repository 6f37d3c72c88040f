"""Rules that keep checkpoints complete, or retire them: plans of repair, policies of retention."""
