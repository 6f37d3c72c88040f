"""The cluster torture: random schedules of saves, loads and faults from a seed, and an oracle that watches them."""
