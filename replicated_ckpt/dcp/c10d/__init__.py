"""The messages between ranks, over the c10d store."""
