"""Reads pickles without an unpickler: a follower of their opcodes makes a tree of the content."""
