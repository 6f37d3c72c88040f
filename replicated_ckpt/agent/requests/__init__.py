"""One HTTP request: its body, its answer, its heartbeat."""
