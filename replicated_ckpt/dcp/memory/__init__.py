"""The memory tier: every checkpoint in the memory of its node and of the buddy, some of them on disks."""
