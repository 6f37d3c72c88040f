"""What lies in a bucket: commit marks, plans of uploads."""
