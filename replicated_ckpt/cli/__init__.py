"""The command line: one file per verb. Only the drill's workers may import torch."""
