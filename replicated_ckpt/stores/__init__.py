"""Bytes at rest: local directories, peers and buckets behind small interfaces. They are independent of DCP; torch may
not enter.

A save writes each shard through the `tee`. A load reads it from `any_source`, whose sources are each `verified`.
"""
