"""Directories without a manifest on a node's disk."""
