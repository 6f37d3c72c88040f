"""Fuzzing of everything that reads bytes from outside: `make fuzz`, and a few seconds of it in the test suite."""
