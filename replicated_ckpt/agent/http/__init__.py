"""The agent's HTTP server and its routes."""
