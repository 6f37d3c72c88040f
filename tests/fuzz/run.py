"""Runs targets for a time or for a number of inputs. Failing inputs are added to the corpus, which every run tries
first.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from tests.fuzz.mutate import changed
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).resolve().parent / "corpus"
_FAILURES_MAX = 5
_FROM_CORPUS = 0.05
"""The share of inputs that are mutations of the corpus."""


@dataclass
class Outcome:
    """The result of a run: the number of inputs by outcome, and the files of the inputs that failed."""

    said: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return self.said.total()


def corpus_of(target: str) -> list[Path]:
    return sorted((CORPUS / target).glob("*.bin"))


def run(target: str, seed: int, *, seconds: float = float("inf"), inputs: int | None = None) -> Outcome:
    """Tries the corpus, and then inputs drawn from the seed, until the time is up or `inputs` were tried."""
    outcome, until = Outcome(), time.monotonic() + seconds
    for number, raw in enumerate(_drawn(target, Random(seed))):
        if number == inputs or time.monotonic() >= until or len(outcome.failed) >= _FAILURES_MAX:
            break
        try:
            outcome.said[TARGETS[target].attempt(raw)] += 1
        except Exception as exc:  # noqa: BLE001 - any exception is a finding
            outcome.said["failed"] += 1
            outcome.failed.append(f"{_kept(target, raw)}: {type(exc).__name__}: {exc}"[:1000])
    return outcome


def _drawn(target: str, random: Random) -> Iterator[bytes]:
    known = [path.read_bytes() for path in corpus_of(target)]
    yield from known
    for _ in count():
        if known and random.random() < _FROM_CORPUS:
            yield changed(random.choice(known), random)
        else:
            yield TARGETS[target].make(random)


def _kept(target: str, raw: bytes) -> Path:
    path = CORPUS / target / f"failed-{hashlib.sha256(raw).hexdigest()[:16]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path
