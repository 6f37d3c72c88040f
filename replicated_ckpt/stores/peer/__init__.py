"""Another node's agent, from its client's side."""
