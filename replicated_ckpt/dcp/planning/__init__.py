"""Plans that travel once or not at all: those of saves, cached from one to the next, and those of loads."""
