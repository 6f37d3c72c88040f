"""The exchange of pieces that the ranks of one node fetch for each other during a load."""
