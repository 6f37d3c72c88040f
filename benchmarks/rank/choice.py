"""The ways to save, ours and others', by name. A peer's package is imported only if it is chosen."""

from collections.abc import Mapping
from typing import Any

from benchmarks.rank.ways import Ours, OursBucket, OursKeepingOne, Stock, StockBucket, Way
from replicated_ckpt import CachedSavePlanner
from tests.steps.context import Context


def way_of(context: Context, kind: str, options: Mapping[str, Any]) -> Way:
    """The way called `kind`, with its options.

    Raises:
        ValueError: no way has this name.
    """
    match kind:
        case "stock":
            return Stock(context)
        case "stock bucket":
            return StockBucket(**options)
        case "ours bucket":
            return OursBucket(context, **options)
    return (_ours if kind.startswith("ours") else _peer)(context, kind, options)


def _ours(context: Context, kind: str, options: Mapping[str, Any]) -> Way:
    match kind:
        case "ours" | "ours with plans kept":
            return Ours(context, options, None if kind == "ours" else CachedSavePlanner())
        case "ours in one file":  # all entries count as weights, so there is one file
            return Ours(context, {**options, "part_of": lambda _: "weights"}, CachedSavePlanner())
        case "ours that keeps one":
            return OursKeepingOne(context, options)
        case "ours that lose a node":
            from benchmarks.rank.losing import LosingOurs

            return LosingOurs(context, options)
    raise ValueError(f"no way of ours is called {kind!r}")


def _peer(context: Context, kind: str, options: Mapping[str, Any]) -> Way:
    match kind:
        case "torchsnapshot":
            from benchmarks.peers.snapshot import Torchsnapshot

            return Torchsnapshot(context)
        case "nvrx" | "nvrx clique":
            from benchmarks.peers.nvrx import Nvrx

            return Nvrx(context, copies=2 if kind == "nvrx clique" else 1)
        case "flashpoint":
            from benchmarks.peers.flashpoint import Flashpoint

            return Flashpoint(context)
        case "lm-resiliency":
            from benchmarks.peers.gemini import LmResiliency

            return LmResiliency(context)
        case "s3torchconnector":
            from benchmarks.peers.s3connector import S3Connector

            return S3Connector(**options)
    raise ValueError(f"no way to save is called {kind!r}")
