"""docs/cli.md has what the command line says of itself."""

import re

from tests.docs.test_docs import text_of
from tools.cli_page import help_by_verb


def words(text: str) -> list[str]:
    """Versions of Python break lines and set brackets differently."""
    return re.sub(r"[\[\](){}|]", " ", text).split()


def shown_by_verb() -> dict[str, str]:
    return dict(
        re.findall(r"^### ([\w ]+)\n\n```text\n(.*?)\n```$", text_of("docs/cli.md"), flags=re.DOTALL | re.MULTILINE)
    )


def test_each_verb_is_shown_as_its_help_says() -> None:
    """Every verb with every option, and nothing that is gone; `python -m tools.cli_page` writes it anew."""
    assert {verb: words(text) for verb, text in shown_by_verb().items()} == {
        verb: words(text) for verb, text in help_by_verb().items()
    }
