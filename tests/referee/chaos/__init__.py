"""ckpt-chaos, a third-party referee, kills a program at each of its file events and judges the resumed run."""
