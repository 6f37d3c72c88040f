"""Plans that are sent once or not at all: plans of saves, cached from one save to the next, and plans of loads."""
