"""The tests, by area."""
