"""Bytes at rest: local directories and peers behind small interfaces. Knows nothing of DCP; torch may not enter."""
