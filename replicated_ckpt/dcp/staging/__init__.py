"""Staging: the copy of a state that an asynchronous save reads while training continues."""
