"""Several nodes on one machine, broken on purpose. Only `launcher`, `worker`, `workload` and `dataset` import torch."""
