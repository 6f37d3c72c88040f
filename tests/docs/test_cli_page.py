"""docs/cli.md matches the help of the command line."""

import re

from tests.docs.test_docs import text_of
from tools.cli_page import help_by_verb


def words(text: str) -> list[str]:
    """The words of a text. Line breaks and brackets differ between versions of Python."""
    return re.sub(r"[\[\](){}|]", " ", text).split()


def shown_by_verb() -> dict[str, str]:
    return dict(
        re.findall(r"^### ([\w ]+)\n\n```text\n(.*?)\n```$", text_of("docs/cli.md"), flags=re.DOTALL | re.MULTILINE)
    )


def test_the_page_matches_the_help() -> None:
    """The page has every command with every option, and nothing else. `python -m tools.cli_page` writes it."""
    assert {verb: words(text) for verb, text in shown_by_verb().items()} == {
        verb: words(text) for verb, text in help_by_verb().items()
    }
