"""Versions under one name: what a save may replace, what is kept of it, and how it goes."""
