"""The command line: one file per verb. `export`, `import` and the drill's ranks alone import torch, when they run."""
