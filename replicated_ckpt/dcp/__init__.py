"""The rooms that import torch: the DCP StorageWriter and StorageReader on top of the storage engine."""
