"""Uses and changes of torch and Python beyond their public names."""
