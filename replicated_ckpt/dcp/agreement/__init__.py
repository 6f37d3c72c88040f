"""The messages between the ranks and nodes of one save: announcement, decision, receipts, and commands."""
