"""Several nodes on one machine, broken on purpose. Only `job` imports torch."""
