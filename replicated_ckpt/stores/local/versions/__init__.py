"""Versions under one name: which ones a save may replace, which files stay, and how a version is removed."""
