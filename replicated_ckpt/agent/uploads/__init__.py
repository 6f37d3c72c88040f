"""Uploads to the bucket, and retention there."""
