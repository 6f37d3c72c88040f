"""What the ranks and nodes of one save tell each other: its announcement, the decision, receipts, and commands."""
