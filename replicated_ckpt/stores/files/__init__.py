"""Files: durable writes, direct I/O, ownership."""
