"""Classes at the seams of training frameworks. Each module needs its framework; nothing else imports one."""
