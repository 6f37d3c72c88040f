"""Words that depend on a number. No other module is imported here."""


def plural(count: int, noun: str) -> str:
    """A count and what is counted: "1 node", "2 nodes"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"
