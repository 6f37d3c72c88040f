"""Save plans that are kept from one save to the next."""
