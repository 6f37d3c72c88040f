"""Bytes that nobody's pickler writes, by the million: `make fuzz`, and a few seconds of it in the suite."""
