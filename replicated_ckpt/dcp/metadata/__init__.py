"""DCP's metadata: read safely, written small."""
