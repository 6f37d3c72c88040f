"""What ranks, agents and the command line all run: the saves, peers, state files and uploads of one node."""
