"""One request, by HTTP or the local socket: its body, its answer, its heartbeat; the threads that serve requests."""
