"""How much memory a rank may take: the minimum that the machine and its cgroups leave, divided among the node's ranks."""

import os
from pathlib import Path

import pytest

from replicated_ckpt.dcp.staging import segment
from replicated_ckpt.dcp.staging.segment import available_bytes, share_of_rank

MIB = 1 << 20


def machine(tmp_path: Path, cgroup: str, available_mib: int = 1000) -> tuple[Path, Path]:
    """A fake /proc and /sys/fs/cgroup."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable: {available_mib << 10} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    cgroups.mkdir()
    return proc, cgroups


def limit(folder: Path, limited: str, used_mib: int, page_cache_mib: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limited}\n")
    (folder / "memory.current").write_text(f"{used_mib * MIB}\n")
    half = page_cache_mib * MIB // 2
    (folder / "memory.stat").write_text(f"anon 5\nfile 999999999999\ninactive_file {half}\nactive_file {half}\n")


def test_without_limits_the_machines_memory_counts(tmp_path: Path) -> None:
    """Without a cgroup limit, the machine's available memory counts. The root cgroup has no memory files."""
    where = machine(tmp_path, "0::/job\n")
    limit(where[1] / "job", "max", 5)
    assert available_bytes(*where) == 1000 * MIB


def test_each_limit_above_counts(tmp_path: Path) -> None:
    """The tightest limit of the cgroup and its parents counts. Page cache counts as available."""
    where = machine(tmp_path, "0::/pod/container\n")
    limit(where[1] / "pod", str(500 * MIB), 450, page_cache_mib=100)
    limit(where[1] / "pod" / "container", str(300 * MIB), 20)
    assert available_bytes(*where) == 150 * MIB
    limit(where[1] / "pod" / "container", str(300 * MIB), 310)
    assert available_bytes(*where) == 0


def test_a_container_that_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    """In a container /proc has the host's cgroup path, while the files are at the root."""
    where = machine(tmp_path, "0::/kubepods/pod1/container2\n")
    limit(where[1], str(64 * MIB), 4)
    assert available_bytes(*where) == 60 * MIB


def test_cgroups_version_1(tmp_path: Path) -> None:
    """Limits of cgroups version 1 count. Its value for "no limit" does not."""
    where = machine(tmp_path, "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n")
    for folder, limited in ((where[1] / "memory" / "a" / "b", 200 * MIB), (where[1] / "memory", 0x7FFFFFFFFFFFF000)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(str(limited))
        (folder / "memory.usage_in_bytes").write_text(str(50 * MIB))
        (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {7 * MIB}\ntotal_active_file {3 * MIB}\n")
    assert available_bytes(*where) == 160 * MIB


def test_ranks_of_a_node_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank may take its part of nine tenths of the available memory, as all ranks stage at once."""
    monkeypatch.setattr(segment, "available_bytes", lambda: 1000)
    assert share_of_rank({}) == 900
    assert share_of_rank({"LOCAL_WORLD_SIZE": "4"}) == 225


@pytest.mark.parametrize(
    ("told", "share"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 225),
        ({"SLURM_TASKS_PER_NODE": "1(x3),9"}, 100),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_TASKS_PER_NODE": "1(x3)"}, 450),
        ({"SLURM_TASKS_PER_NODE": "many"}, 900),
    ],
)
def test_ranks_that_torchrun_has_not_started_share(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], share: int
) -> None:
    """The number of ranks per node comes from the variables of Slurm or Open MPI if torchrun's is not set."""
    monkeypatch.setattr(segment, "available_bytes", lambda: 1000)
    assert share_of_rank(told) == share


def test_a_kernel_without_cgroups(tmp_path: Path) -> None:
    """Without cgroups the machine's available memory counts, and nothing is raised."""
    where = machine(tmp_path, "")
    (where[0] / "self" / "cgroup").unlink()
    assert available_bytes(*where) == 1000 * MIB


def test_this_machine_can_be_read() -> None:
    """The real files of this machine can be parsed."""
    assert 0 < available_bytes() < 1 << 50


def test_a_cgroup_may_have_any_name(tmp_path: Path) -> None:
    """A cgroup's name may be any bytes except a line feed."""
    name = b"job\xff\xe2\x80\xa8x"  # contains a character that only Python treats as a line end
    where = machine(tmp_path, "")
    (where[0] / "self" / "cgroup").write_bytes(b"0::/" + name + b"\n")
    limit(where[1] / os.fsdecode(name), str(64 * MIB), 4)
    assert available_bytes(*where) == 60 * MIB
