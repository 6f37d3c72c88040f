"""Verbs about checkpoints: which there are, whether they are whole, what mends or uploads them."""
