"""The rules of the referee's verdict. `make referee` runs the referee itself."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.referee import sources, verdict

ROOT = Path(__file__).resolve().parents[2]
STOCK = {"t::passes": "passed", "t::fails": "failed", "t::skipped": "skipped"}


@pytest.mark.parametrize(
    ("ours", "expected", "defects", "stale", "known"),
    [
        ("passed", False, (), (), ()),
        ("failed", False, ("ours: t::passes",), (), ()),
        ("skipped", False, ("ours: t::passes",), (), ()),
        ("", False, ("ours: t::passes",), (), ()),
        ("failed", True, (), (), ("ours: t::passes",)),
        ("passed", True, (), ("ours: t::passes",), ()),
    ],
)
def test_what_stock_passes_must_pass_or_be_expected_not_to(
    ours: str, expected: bool, defects: tuple[str, ...], stale: tuple[str, ...], known: tuple[str, ...]
) -> None:
    """A test that passes with stock but not with ours, or did not run, is a defect.

    An expected failure that passes is stale.
    """
    reasons = {"t::fails": "stock fails it, so it says nothing", **({"t::passes": "a reason"} if expected else {})}
    outcomes = {"t::fails": "passed", "t::skipped": "failed", **({"t::passes": ours} if ours else {})}
    found = verdict.judged({"stock": STOCK, "ours": outcomes}, reasons)
    assert (found.defects, found.stale, found.known, found.judged) == (defects, stale, known, 1)
    assert found.is_good == (not defects and not stale)


def test_a_run_of_nothing_is_not_good() -> None:
    """No test passes with stock, so nothing was judged."""
    assert not verdict.judged({"stock": {}, "ours": {}}, {}).is_good


def test_a_run_of_few_tests_is_not_good() -> None:
    """A full run fails if too few of torch's tests run, or too few of them use the storage."""
    enough = verdict.JUDGED_MIN, verdict.USING_MIN
    assert verdict.describe_shortage(*enough) is None
    for judged, using in ((enough[0] - 1, enough[1]), (enough[0], enough[1] - 1)):
        said = verdict.describe_shortage(judged, using)
        assert said is not None
        assert f"{judged} tests" in said


def test_a_test_fails_if_any_part_of_it_does(tmp_path: Path) -> None:
    """A test whose setup or teardown fails counts as failed, whatever the order of the lines."""
    lines = [("one", "passed"), ("two", "failed"), ("two", "passed"), ("three", "passed"), ("three", "failed")]
    path = tmp_path / "outcomes"
    path.write_text("\n".join(json.dumps({"test": test, "outcome": outcome}) for test, outcome in lines))
    assert verdict.outcomes_in(path) == {"one": "passed", "two": "failed", "three": "failed"}


def test_every_test_of_a_run_is_written_down(tmp_path: Path) -> None:
    """The plugin writes each test's outcome. A test without a line would count as not run."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "tests.referee.record", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "REFEREE_OUTCOMES": str(tmp_path / "outcomes")},
        check=False,
        timeout=100,
    )
    assert verdict.outcomes_in(tmp_path / "outcomes") == {
        "test_some.py::test_a": "passed",
        "test_some.py::test_b": "failed",
        "test_some.py::test_c": "skipped",
    }


def test_what_came_to_stocks_storage_is_not_counted_as_ours(tmp_path: Path) -> None:
    """A test that used stock's storage, alone or besides ours, does not count for ours."""
    (tmp_path / "one").write_text("ours t::a\nours t::b\nours t::b\n")
    (tmp_path / "two").write_text("stock t::b\nstock t::c\n")
    use = verdict.use_in([tmp_path / "one", tmp_path / "two", tmp_path / "none"])
    assert use.alone == {"t::a"}
    assert use.stock == {"t::b", "t::c"}


@pytest.mark.long
def test_stocks_own_storage_says_that_it_was_called(tmp_path: Path) -> None:
    """With our classes installed, a save through a stock class that a test kept is recorded as use of stock."""
    program = (
        "from torch.distributed.checkpoint import filesystem\n"
        "import torch.distributed.checkpoint as dcp, torch\n"
        "stock = dcp.FileSystemWriter.__mro__[1].__name__, filesystem._FileSystemWriter.__name__\n"
        "class Kept(filesystem._FileSystemWriter):\n"
        "    pass\n"
        "dcp.save({'a': torch.ones(2)}, storage_writer=Kept('kept'), no_dist=True)\n"
        "assert stock == ('ReplicatedWriter', '_FileSystemWriter'), stock\n"
    )
    paths = os.pathsep.join([str(ROOT / "tests" / "referee" / "inject"), str(ROOT)])
    environment = {"PYTHONPATH": paths, "REFEREE_MODE": "together", "REFEREE_USED": str(tmp_path / "used")}
    environment |= {"REFEREE_ROOTS": str(tmp_path), "PYTEST_CURRENT_TEST": "test_x.py::test_y (call)"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=tmp_path,
        env=os.environ | environment,
        check=True,
        timeout=100,
    )
    assert verdict.use_in([tmp_path / "used"]) == verdict.Use(frozenset(), frozenset({"test_x.py::test_y"}))


def test_each_expectation_has_a_reason() -> None:
    """No test is listed twice."""
    reason_by_test = verdict.expectations()
    text = (Path(verdict.__file__).parent / "expected.toml").read_text()
    assert all(len(reason) > 20 for reason in reason_by_test.values())
    assert all(text.count(f'"{test}"') == 1 for test in reason_by_test)


def test_only_torchs_checkpoint_tests_are_unpacked(tmp_path: Path) -> None:
    """No other file of the source archive is unpacked."""
    source = tmp_path / "source"
    wanted = "test/distributed/checkpoint/test_file_system_checkpoint_cpu.py"
    for name in (wanted, "test/test_torch.py", "setup.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    with tarfile.open(tmp_path / "sources.tar.xz", "w:xz") as tar:
        tar.add(source, "pytorch-1.0")
    sources.extract(tmp_path / "sources.tar.xz", tmp_path / "checkout")
    found = sources.tests_in(tmp_path / "checkout")
    assert (found / Path(wanted).name).read_text() == wanted
    assert [path for path in (tmp_path / "checkout").rglob("*") if path.is_file()] == [tmp_path / "checkout" / wanted]
    with pytest.raises(SystemExit):
        sources.tests_in(source / "test" / "distributed")


def test_the_table_counts_what_uses_the_storage() -> None:
    """Per file and in total: passes with stock, how many of them use the storage, and passes with ours."""
    outcomes = {"stock": STOCK, "ours": {"t::passes": "passed", "t::fails": "passed"}}
    assert verdict.table(outcomes, {"t::passes", "t::fails"}).splitlines()[2:] == [
        "| `t` | 1 | 1 | 1 |",
        "| all | 1 | 1 | 1 |",
    ]
