"""The node's process: receives copies, commits, serves byte ranges. Torch may not enter."""
