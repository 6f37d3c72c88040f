"""What lies in a bucket: keys, commit marks, plans of uploads."""
