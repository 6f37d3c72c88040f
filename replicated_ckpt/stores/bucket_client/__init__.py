"""How a bucket is spoken to: one small interface, our own client for S3, fsspec for everything else."""
