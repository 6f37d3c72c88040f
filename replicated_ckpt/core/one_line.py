"""Words from elsewhere on one line: what a peer says forges no line of a log and steers no terminal."""


def one_line(text: object, chars_max: int = 2000) -> str:
    """A peer's words as they may stand in a log or an error: bounded, and no line of their own making."""
    said = str(text)[:chars_max]
    return said if said.isprintable() else "".join(char if char.isprintable() else "?" for char in said)
