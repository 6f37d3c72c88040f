"""Object stores for tests: servers that run here, a weak store of our own, and bad weather in front of any of them."""
