"""Checksums of blocks and files, the footer that carries them in a shard, and checks of files that have none of ours."""
