"""ckpt-chaos, a referee of others, kills a program at each of its file events and judges what the resumed one did."""
