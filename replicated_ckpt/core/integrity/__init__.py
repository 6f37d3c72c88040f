"""Checksums, and what is read without them: containers and archives."""
