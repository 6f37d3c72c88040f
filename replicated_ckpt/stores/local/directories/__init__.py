"""The directories under a root: staged saves with intent and place, committed checkpoints, their catalog."""
