"""Code that ranks, agents and the command line share: the saves, peers, state files and uploads of one node."""
