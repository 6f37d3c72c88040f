"""The memory tier: each checkpoint in the memory of its node and of a buddy; some of them on disks, too."""
