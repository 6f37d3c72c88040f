"""The job that a drill breaks: what its ranks run. Only this part of the drill imports torch."""
