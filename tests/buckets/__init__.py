"""Object stores for tests: S3 servers on this machine, a weak store, and a proxy that injects faults."""
