"""The command line: one file per verb. Only `export`, `import` and the drill's ranks import torch, when they run."""
