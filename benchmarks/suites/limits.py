"""The least time of a save or load on this machine, from probes of its parts in the same run.

The device is busy for the time that writing or reading all copies alone takes. The cores are busy for the CPU seconds
of all parts together. The longer of the two is the limit. It includes nothing else that a real save does.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.suites.results import Sample


@dataclass(frozen=True)
class Resource:
    """One probe over the whole state, on all ranks at once: seconds, and CPU seconds of all ranks."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Limits:
    """`by_name` has the probes: copy, checksum, network, write, write direct, read."""

    by_name: Mapping[str, Resource]
    cores: int

    def save_s(self, copies: int) -> float:
        """Every byte gets a checksum, is written to `copies` files, and is sent to all but one of them."""
        write = self._write()
        cpu_s = self._cpu_s("checksum") + copies * write.cpu_s + (copies - 1) * self._cpu_s("network")
        return max(copies * write.seconds, cpu_s / self.cores)

    def load_s(self, remote_fraction: float = 0.0) -> float:
        """Every byte is read and gets a checksum. `remote_fraction` of them come over the network."""
        read = self.by_name["read"]
        cpu_s = self._cpu_s("checksum") + read.cpu_s + remote_fraction * self._cpu_s("network")
        return max(read.seconds, cpu_s / self.cores)

    def _write(self) -> Resource:
        return min((self.by_name[n] for n in ("write", "write direct") if n in self.by_name), key=lambda r: r.seconds)

    def _cpu_s(self, name: str) -> float:
        return self.by_name[name].cpu_s if name in self.by_name else 0.0


def limits_of(probes: Mapping[str, Sequence[Sample]]) -> Limits:
    """Medians over the rounds."""
    by_name = {
        name: Resource(
            statistics.median(sample["seconds"] for sample in samples),
            statistics.median(sample["rank_cpu_s"] for sample in samples),
        )
        for name, samples in probes.items()
    }
    return Limits(by_name, len(os.sched_getaffinity(0)))
