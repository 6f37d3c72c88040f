"""A pytest plugin that writes the outcome of each test, one JSON object per line."""

import json
import os
from pathlib import Path

import pytest

OUTCOMES_ENV = "REFEREE_OUTCOMES"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    line = {
        "test": report.nodeid,
        "when": report.when,
        "outcome": report.outcome,
        "why": str(report.longrepr or "")[-4000:],
    }
    with Path(os.environ[OUTCOMES_ENV]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        line = {"test": report.nodeid, "when": "collect", "outcome": "failed", "why": str(report.longrepr)[-4000:]}
        with Path(os.environ[OUTCOMES_ENV]).open("a") as file:
            file.write(json.dumps(line) + "\n")
