"""A store directory whose agent is stopped after the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.agents import stop_agent


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory for a store. An agent that a save starts there is stopped after the test."""
    yield tmp_path / "root"
    stop_agent(tmp_path / "root")
