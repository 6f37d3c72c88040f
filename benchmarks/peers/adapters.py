"""Adapters of peers by name; each imports its peer only when it is made, in the ranks."""

from collections.abc import Mapping
from typing import Any

from benchmarks.rank.ways import Way
from tests.multiprocess.context import Context


def way_of(context: Context, kind: str, options: Mapping[str, Any]) -> Way:
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
        case "ours that lose a node":
            from benchmarks.rank.losing import LosingOurs

            return LosingOurs(context, options)
    raise ValueError(f"no way to save is called {kind!r}")
