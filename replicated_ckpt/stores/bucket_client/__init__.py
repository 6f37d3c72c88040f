"""Access to a bucket: one small interface, this package's own client for S3, and fsspec for everything else."""
