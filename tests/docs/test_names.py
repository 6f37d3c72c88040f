"""The files, modules and functions that the documents name exist."""

import re
from importlib import import_module

import pytest

from replicated_ckpt import failpoints
from tests.docs.test_docs import DOCUMENTS, ROOT, text_of, without_code

ROOMS = ("agent", "cli", "core", "dcp", "drill", "integrations", "stores", "testing")
OF_TORCH = {"dcp.async_save", "dcp.load", "dcp.save"}


def missing_files(text: str) -> list[str]:
    """The Python files in backticks that exist neither in the repository, nor in the package, nor in the tests."""
    named = re.findall(r"`([\w.-]+/[\w./-]+\.py)`", text)
    return [
        path for path in named if not any((ROOT / place / path).is_file() for place in ("", "replicated_ckpt", "tests"))
    ]


def missing_names(text: str) -> list[str]:
    """The dotted names in backticks that begin with a package of the project and cannot be resolved."""
    named = set(re.findall(rf"`(?:replicated_ckpt\.)?((?:{'|'.join(ROOMS)})\.[\w.]+)`", text))
    return sorted(
        name for name in named - OF_TORCH - failpoints.POINTS.keys() if not _resolves(f"replicated_ckpt.{name}")
    )


def _resolves(name: str) -> bool:
    module, _, attributes = name, "", ""
    while module:
        try:
            found = import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes = f"{last}.{attributes}".strip(".")
            continue
        for attribute in filter(None, attributes.split(".")):
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_names_of_the_code_exist(document: str) -> None:
    """Each file and name of a page exists."""
    text = without_code(text_of(document))
    assert (missing_files(text), missing_names(text)) == ([], [])


def test_a_name_that_was_moved_is_found() -> None:
    """Shows that the test above can fail."""
    assert missing_names("`core.retention.plan_retention` `dcp.save` `core.upkeep.retention.plan_retention`") == [
        "core.retention.plan_retention"
    ]
    assert missing_files("`core/retention.py` `core/upkeep/retention.py`") == ["core/retention.py"]
