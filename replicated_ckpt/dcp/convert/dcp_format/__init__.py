"""Directories of torch's own DCP format."""
