"""The text format of Prometheus. Source: prometheus.io/docs/instrumenting/exposition_formats."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from replicated_ckpt.node.state.rank_reports import BOUNDS_S, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus 3 refuses an answer without this type."""
Labels = Mapping[str, str]
PREFIX = "replicated_ckpt_"


@dataclass(frozen=True)
class Family:
    """One metric. Each sample has a suffix of the name, which only histograms use, its labels and its value."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    samples: Sequence[tuple[str, Labels, float]]


def gauge(name: str, help_: str, value: float) -> Family:
    return Family(name, "gauge", help_, [("", {}, value)])


def counter(name: str, help_: str, value: float) -> Family:
    return Family(name, "counter", help_, [("", {}, value)])


def make_family(
    kind: Literal["gauge", "counter"], name: str, help_: str, values: Iterable[tuple[Labels, float]]
) -> Family:
    return Family(name, kind, help_, [("", labels, value) for labels, value in values])


def histogram(name: str, help_: str, found: Iterable[tuple[Labels, Histogram]]) -> Family:
    samples: list[tuple[str, Labels, float]] = []
    for labels, each in found:
        *counts, total = accumulate(each.counts)
        buckets = zip((*map(str, BOUNDS_S), "+Inf"), (*counts, total), strict=True)
        samples += [("_bucket", {**labels, "le": bound}, count) for bound, count in buckets]
        samples += [("_sum", labels, each.sum_s), ("_count", labels, total)]
    return Family(name, "histogram", help_, samples)


def render(families: Iterable[Family]) -> bytes:
    lines = []
    for family in families:
        name = PREFIX + family.name
        lines += [f"# HELP {name} {_escape(family.help)}", f"# TYPE {name} {family.kind}"]
        lines += [f"{name}{suffix}{_render(labels)} {value!r}" for suffix, labels, value in family.samples]
    return ("\n".join(lines) + "\n").encode()


def _render(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_quote(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _quote(value: str) -> str:
    return _escape(value).replace('"', r"\"")


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
