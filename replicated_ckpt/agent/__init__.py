"""The node's process: receives copies, commits saves, and serves byte ranges. It does not import torch."""
