"""Where an export writes: a directory or a URL."""
