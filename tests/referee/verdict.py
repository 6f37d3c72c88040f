"""The referee's verdict: a test that passes with stock storage must pass with ours, or be an expected failure with a
reason.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

STOCK, OURS = "stock", "ours"
PASSED = "passed"
JUDGED_MIN, USING_MIN = 90, 44
"""Of a run of all tests: some less than with any torch until now. With fewer, something keeps them from running."""
Outcomes = Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """The lists name tests as "mode: test". `judged` counts the tests that pass with stock."""

    defects: tuple[str, ...]
    known: tuple[str, ...]
    stale: tuple[str, ...]
    judged: int

    @property
    def is_good(self) -> bool:
        return not self.defects and not self.stale and self.judged > 0


def judged(outcomes_by_mode: Mapping[str, Outcomes], reason_by_test: Mapping[str, str]) -> Verdict:
    """Compares each mode with stock. A test that does not pass with stock is ignored, also if it is an expected
    failure.
    """
    stock = {test for test, outcome in outcomes_by_mode[STOCK].items() if outcome == PASSED}
    defects: list[str] = []
    known: list[str] = []
    stale: list[str] = []
    for mode, outcomes in outcomes_by_mode.items():
        if mode == STOCK:
            continue
        for test in sorted(stock):
            is_expected, is_passed = test in reason_by_test, outcomes.get(test) == PASSED
            if is_expected == is_passed:
                (stale if is_passed else defects).append(f"{mode}: {test}")
            elif is_expected:
                known.append(f"{mode}: {test}")
    return Verdict(tuple(defects), tuple(known), tuple(stale), len(stock))


def describe_shortage(judged: int, using: int) -> str | None:
    """Why a full run covers too little, or None: `judged` tests pass with stock, and `using` of them use our storage."""
    if judged >= JUDGED_MIN and using >= USING_MIN:
        return None
    return f"{judged} tests pass with stock ({JUDGED_MIN} at least), {using} of them use the storage ({USING_MIN} at least)"


@dataclass(frozen=True)
class Use:
    """The tests that used our storage, and those that used stock's although ours is installed."""

    ours: frozenset[str]
    stock: frozenset[str]

    @property
    def alone(self) -> frozenset[str]:
        """The tests that used our storage only."""
        return self.ours - self.stock


def use_in(paths: Iterable[Path]) -> Use:
    """Reads the files of the runs: one line per use, with the storage and the test."""
    lines = {line for path in paths if path.exists() for line in path.read_text().splitlines()}
    tests_by_storage = {
        storage: frozenset(line.partition(" ")[2] for line in lines if line.partition(" ")[0] == storage)
        for storage in (OURS, STOCK)
    }
    return Use(ours=tests_by_storage[OURS], stock=tests_by_storage[STOCK])


def outcomes_in(path: Path) -> dict[str, str]:
    """The outcome of each test, as the plugin wrote it: failed if any part of the test failed."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if found.get(entry["test"]) != "failed":
            found[entry["test"]] = entry["outcome"]
    return found


def expectations() -> dict[str, str]:
    """The reason of each test that is expected to fail with our storage."""
    document = tomllib.loads(Path(__file__).with_name("expected.toml").read_text())
    return {test: group["reason"] for group in document["expected"] for test in group["tests"]}


def table(outcomes_by_mode: Mapping[str, Outcomes], used: Iterable[str]) -> str:
    """Rows by file: tests that pass with stock, how many of them use the storage, and passes in each mode."""
    stock = [test for test, outcome in outcomes_by_mode[STOCK].items() if outcome == PASSED]
    modes, touching = list(outcomes_by_mode), set(used)
    lines = [
        "| tests | " + " | ".join([STOCK, "using the storage", *modes[1:]]) + " |",
        "|---|" + "---|" * (len(modes) + 1),
    ]
    for name in [*sorted({test.partition("::")[0] for test in stock}), ""]:
        tests = [test for test in stock if not name or test.partition("::")[0] == name]
        counts = [len(tests), len(touching.intersection(tests))]
        counts += [sum(outcomes_by_mode[mode].get(test) == PASSED for test in tests) for mode in modes[1:]]
        lines.append(f"| {f'`{name}`' if name else 'all'} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)
