"""Entries of a state dict on their way from one format to another."""
