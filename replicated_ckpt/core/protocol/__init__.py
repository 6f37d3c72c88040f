"""The commit protocol as values: who decides, what may be dropped, where copies go."""
