"""What keeps checkpoints whole or retires them: plans of repair, policies of retention."""
