"""The training job of a drill, as its ranks run it. Only this part of the drill imports torch."""
