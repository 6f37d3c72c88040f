"""Object stores for tests: servers that run here, a weak store of our own, and a proxy that brings faults to them."""
