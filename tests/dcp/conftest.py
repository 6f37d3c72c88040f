"""Stores whose agents end with their test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.agents import stop_agent


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory for a store; the agent that saves start there is stopped."""
    yield tmp_path / "root"
    stop_agent(tmp_path / "root")
