"""Classes that plug into training frameworks. Each module needs its framework; nothing else imports one."""
