"""Bytes at rest: local directories, peers and buckets behind small interfaces. Knows nothing of DCP; torch may not enter.

A save writes each shard through the `tee`; a load reads it from `any_source`, of which each is `verified`.
"""
