"""Object stores: clients, uploads, shards that are read from there."""
