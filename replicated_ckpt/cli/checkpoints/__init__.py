"""Verbs that list, show, check, repair, reject, upload and convert checkpoints."""
