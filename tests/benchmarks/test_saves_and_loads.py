"""The benchmark of saves and loads runs, verifies the loaded values, and writes its figures into the documents."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.machine import HOME
from benchmarks.rank import state
from benchmarks.report.documents import BEGIN, END, NoMarks, written
from benchmarks.report.page_plots import PLOTS, draw_plots
from benchmarks.suites.limits import limits_of
from benchmarks.suites.loading import ALL_LOCAL, REPLACED, SHRUNK, STARTS_AGENTS
from benchmarks.suites.results import Results, Row, from_json
from benchmarks.suites.saving import STOCK
from benchmarks.suites.setup import kind_of
from benchmarks.training_stall import CASES as STALL_CASES

SAVES = [
    STOCK,
    "ours, 1 copy",
    "ours, 1 copy, plans kept",
    "ours, 2 copies, ack=local",
    "ours, 2 copies, ack=peer-memory",
    "ours, 2 copies, ack=peer",
    "ours, 2 copies, ack=peer, plans kept",
]
CASES = {
    "save": set(SAVES),
    "load": {STOCK, ALL_LOCAL, STARTS_AGENTS, SHRUNK, REPLACED},
    "repeat": {"stock, compared with 2 copies", "ours, 2 copies"},
    "stall": {case["name"] for case in STALL_CASES},
}
MACHINE = dict.fromkeys(("date", "cores", "cpu", "torch", "commit", "load_before"), "?")


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize("suites", ["save", "save,load,small,repeat,emulated,peers,stall"])
def test_it_runs_and_its_figures_reach_the_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suites: str
) -> None:
    """Each case has samples and is named by the table and the JSON file. Documents and plots are made of them."""
    file, medium = tmp_path / "samples.json", "tmpfs" if kind_of(tmp_path) == "tmpfs" else "disk"
    arguments = ["--quick", "--suite", suites, "--size-mib", "8", "--items", "200"]
    where = ["--medium", medium, "--disk", str(tmp_path), "--json", str(file)]
    assert main([*arguments, *where]) == 0
    printed, results = capsys.readouterr().out, from_json(json.loads(file.read_text()))
    for suite, cases in CASES.items():
        assert {row.case for row in results.of(suite) if row.work != "probe"} == (cases if suite in suites else set())
    for row in results.rows:
        assert row.case in printed or row.work == "probe"
        assert row.note if not row.samples else row.seconds > 0
    for suite in {"emulated", "peers"} & set(suites.split(",")):
        assert f"{suite}:" in printed or results.of(suite)
    page = tmp_path / "docs" / "measurements.md"
    page.parent.mkdir()
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for path in written(results, tmp_path):
        text = path.read_text()
        if path.suffix == ".svg":
            ET.fromstring(text)
        else:
            assert (text[:7], text[-7:], "old" in text) == ("before\n", "\nafter\n", False)
            assert SAVES[-1] in text


def test_wrongly_loaded_values_are_named() -> None:
    """After one flipped bit, or with two tensors swapped, the state names the wrong tensors."""
    values = state.small(40 << 10, 0, 1)
    assert values.wrong() == []
    values.parts[3].words[1000] ^= 1
    assert values.wrong() == ["tensor3"]
    values.fill()
    first, second = values.parts[:2]
    first.words.copy_(second.words)
    assert values.wrong() == ["tensor0"]
    values.spoil()
    assert len(values.wrong()) == 10


def test_a_state_is_in_the_memory_that_dcp_is_given() -> None:
    """The verification reads the tensors that DCP loads into."""
    values = state.plain(1 << 20, 0, 1)
    assert values.size_bytes == 1 << 20
    tensor = values.values["rank0.tensor5"]
    assert isinstance(tensor, torch.Tensor)
    tensor[7] = 1.5
    assert values.wrong() == ["rank0.tensor5"]


def probe(seconds: float, cpu_s: float) -> list[dict[str, float]]:
    return [{"seconds": seconds, "rank_cpu_s": cpu_s}]


def test_the_limit_is_device_or_cores_whichever_is_busy_for_longer() -> None:
    """On a slow disk the writes are the limit. On a fast one it is the sum of CPU seconds over all cores."""
    shared = {"checksum": probe(0.1, 0.2), "network": probe(0.5, 1.0), "read": probe(0.3, 0.4)}
    slow = limits_of({**shared, "write": probe(9.0, 0.5), "write direct": probe(4.0, 0.1)})
    assert (slow.save_s(1), slow.save_s(2)) == (4.0, 8.0)
    fast = limits_of({**shared, "write": probe(0.3, 0.5)})
    assert fast.save_s(2) == pytest.approx(max(0.6, (0.2 + 2 * 0.5 + 1.0) / fast.cores))
    assert fast.load_s(0.5) == pytest.approx(max(0.3, (0.2 + 0.4 + 0.5) / fast.cores))


def test_a_ratio_is_of_times_in_the_same_round() -> None:
    """Both ways are three times slower in the second round: the ratio stays the same."""
    base = Row("save", "a", "save", STOCK, STOCK, 1, [{"seconds": 1.0}, {"seconds": 3.0}])
    ours = Row("save", "a", "save", "ours", STOCK, 1, [{"seconds": 0.5}, {"seconds": 1.5}])
    elsewhere = Row("save", "b", "save", "ours", STOCK, 1, [{"seconds": 0.5}])
    results = Results({}, {}, [base, ours, elsewhere])
    assert (results.ratio(ours), results.ratio(elsewhere)) == (0.5, None)


def test_a_document_without_marks_raises(tmp_path: Path) -> None:
    """The document stays unchanged."""
    document = tmp_path / "docs" / "measurements.md"
    document.parent.mkdir()
    document.write_text("no marks")
    with pytest.raises(NoMarks, match=r"measurements\.md"):
        written(Results(MACHINE, {}), tmp_path)
    assert document.read_text() == "no marks"


def test_each_plot_of_the_documents_shows_the_table_above_it() -> None:
    """`python -m benchmarks.report.page_plots` would change no plot, and draws all of them."""
    pages = [page.read_text(encoding="utf-8") for page in (HOME / "docs").glob("*.md")]
    drawn = {name: text for page in pages for name, text in draw_plots(page)}
    assert {path.name: path.read_text(encoding="utf-8") for path in (HOME / PLOTS).glob("*.svg")} == drawn


def test_a_plot_shows_the_column_that_its_title_names() -> None:
    """A cell with several runs is drawn as their mean. A cell without a number is not drawn."""
    table = "| way | a, s | b, s |\n|---|--:|--:|\n| ours | 0.2–0.4 (9 s) | 7 |\n| stock | - | 8 |\n"
    ((name, text),) = draw_plots(f"{table}\n![Time: a, s](../benchmarks/plots/time.svg)\n")
    labels = [element.text for element in ET.fromstring(text) if element.tag.endswith("text")]
    assert (name, labels) == ("time.svg", ["Time: a, s (lower is better)", "a, s", "ours", "0.2–0.4 (9 s)"])
