"""How saves that a crash left behind end on this node: completed, removed, or in doubt until the nodes that know answer."""
