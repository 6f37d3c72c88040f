"""Words from elsewhere on one line: what a peer says forges no line of a log and steers no terminal."""

from replicated_ckpt.wording import escape_controls


def one_line(text: object, chars_max: int = 2000) -> str:
    """A peer's words as they may stand in a log or an error: bounded, and no line of their own making."""
    return escape_controls(str(text)[:chars_max])[:chars_max]
