"""What lies in a bucket: checkpoints, their shards, and a look at all of it."""
