"""Plans that travel once or not at all: of saves, kept from one to the next, and of loads."""
