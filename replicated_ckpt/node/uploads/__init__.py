"""Uploads to the bucket, tried again until they are there, and retention there."""
