"""The other nodes: their addresses, who answers, what they hold."""
