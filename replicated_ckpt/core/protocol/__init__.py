"""The commit protocol as values: who decides, which versions may be removed, where copies go."""
