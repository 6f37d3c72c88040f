"""What a time-out is called where bytes still come."""


class TooSlow(TimeoutError):
    """A source sends, and so slowly that others are asked before it."""
