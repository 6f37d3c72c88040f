"""The output of an export: a directory or a URL."""
