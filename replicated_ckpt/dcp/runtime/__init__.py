"""What is changed or used of torch and Python beyond their public names."""
