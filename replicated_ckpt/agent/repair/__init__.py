"""Repair by an agent: the rounds of re-protection, their repairs, the scrub and audits."""
