"""Upkeep on this node: the rounds of re-protection, what they mend and what they collect, scrub and audits."""
