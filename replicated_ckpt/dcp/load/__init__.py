"""A load: how each rank reads its items, from the metadata to the report."""
