"""Marks cases as `long`: only `make test-all` runs them. `make test` runs at least one case of each promise."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_long(cases: Iterable[Any], *, keep: Collection[Any]) -> list[Any]:
    """Parameters of a test: the cases to `keep` unchanged, all others marked `long`. A tuple stands for several
    arguments.
    """
    every = list(cases)
    assert all(case in every for case in keep), f"no such case: {[case for case in keep if case not in every]}"
    return [case if case in keep else long(*(case if isinstance(case, tuple) else (case,))) for case in every]


def long(*values: Any) -> Any:
    """One case that is marked `long`."""
    return pytest.param(*values, marks=pytest.mark.long)
