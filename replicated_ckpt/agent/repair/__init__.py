"""Repair by an agent: the rounds of re-protection, what they mend, scrub and audits."""
