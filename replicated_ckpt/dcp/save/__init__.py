"""Saves: the writer, and the steps from the plan of a rank to the commit on all nodes."""
