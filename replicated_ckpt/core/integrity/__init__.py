"""Checksums of blocks and files, the footer that contains them in a shard, and checks of files without such a footer."""
