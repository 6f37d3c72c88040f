"""Pickles read without an unpickler: their opcodes are followed, and give a tree of the content."""
