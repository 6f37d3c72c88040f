"""One saved checkpoint for the tests that only read it."""

from pathlib import Path
from typing import Any

import pytest

from tests.convert.states import checkpoint


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The root of a store with checkpoint `step-1`, and the state dict that was saved."""
    root = tmp_path_factory.mktemp("saved") / "root"
    return root, checkpoint(root)
