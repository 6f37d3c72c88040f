"""Another node's agent, as its client sees it."""
