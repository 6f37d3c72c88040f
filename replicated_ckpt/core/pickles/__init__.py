"""Pickles read without an unpickler: a tree of what one says, made by following its opcodes."""
