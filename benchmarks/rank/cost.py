"""The cost of a piece of work: seconds on rank 0, and CPU time and peak memory of ranks and agents from /proc."""

import contextlib
import gc
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One run of a case. Peaks are the largest growth of a rank and of an agent beyond its memory before the run.

    `seconds`: on rank 0, between barriers. `settled_s`: until the remaining work, such as copies, was done too. CPU
    times and peaks include that work.
    """

    seconds: float
    settled_s: float
    rank_cpu_s: float
    agent_cpu_s: float
    rank_peak_bytes: int
    agent_peak_bytes: int


@dataclass(frozen=True)
class _Reading:
    cpu_s: float
    rss_bytes: int
    peak_bytes: int


def measured(work: Callable[[], object], settle: Callable[[], object], agent_root: Path | None) -> Sample | None:
    """Runs `work` on all ranks at once, then `settle`. Rank 0 gets the sample, the others None.

    `agent_root`: the store whose agent this rank measures, on one rank of each node.
    """
    gc.collect()  # else a collection of all of torch's objects, 0.2 s, would slow a random case
    before, agent_before = _own(forget_peak=True), _agent(agent_root, forget_peak=True)
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    seconds = time.perf_counter() - start
    settle()
    dist.barrier()
    settled_s = time.perf_counter() - start
    after, agent_after = _own(), _agent(agent_root)
    own = {"cpu": after.cpu_s - before.cpu_s, "peak": after.peak_bytes - before.rss_bytes}
    agent = _difference(agent_before, agent_after)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, agent))
    if dist.get_rank() != 0:
        return None
    return Sample(
        seconds,
        settled_s,
        sum(rank["cpu"] for rank, _ in gathered),
        sum(agent["cpu"] for _, agent in gathered),
        max(rank["peak"] for rank, _ in gathered),
        max(agent["peak"] for _, agent in gathered),
    )


def as_json(sample: Sample) -> dict[str, float]:
    return asdict(sample)


def _difference(before: _Reading | None, after: _Reading | None) -> dict[str, float]:
    """An agent that started during the run counts from zero."""
    if after is None:
        return {"cpu": 0.0, "peak": 0}
    had = before if before is not None and before.cpu_s <= after.cpu_s else _Reading(0.0, 0, 0)
    return {"cpu": after.cpu_s - had.cpu_s, "peak": after.peak_bytes - had.rss_bytes}


def _own(*, forget_peak: bool = False) -> _Reading:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return _reading(os.getpid(), usage.ru_utime + usage.ru_stime, forget_peak)


def _agent(root: Path | None, *, forget_peak: bool = False) -> _Reading | None:
    if root is None:
        return None
    try:
        pid = int(json.loads((root / ".agent" / "endpoint.json").read_text())["pid"])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return _reading(pid, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, forget_peak)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _reading(pid: int, cpu_s: float, forget_peak: bool) -> _Reading:
    if forget_peak:
        with contextlib.suppress(PermissionError):  # then the peak counts since the process's start
            Path(f"/proc/{pid}/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    rss, peak = (int(lines[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return _Reading(cpu_s, rss, peak)
