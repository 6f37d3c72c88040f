"""The other nodes: their addresses, which of them answer, and their holdings."""
