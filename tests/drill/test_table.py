"""The result of a drill, as a table and as JSON."""

import json
from dataclasses import replace

import pytest

from replicated_ckpt.drill.plan import DrillOptions, Scenario, plan_drill
from replicated_ckpt.drill.table import HEADER, as_json, render, size
from replicated_ckpt.drill.verdict import LOSS_TOLERANCE, ScenarioReport, report_failure

HELD = ScenarioReport(
    scenario="replace",
    promise="same bits",
    ranks_before=8,
    ranks_after=8,
    shards_lost=4,
    shards=8,
    bytes_local=600_000,
    bytes_peer=1_250_000,
    save_s=0.25,
    detect_s=1.5,
    restore_s=0.75,
    tensors_verified=32,
)


def test_the_table_has_a_line_per_scenario() -> None:
    """Header, rule and rows are aligned. The promise and the notes are explained below."""
    header, rule, row, *rest = render([HELD], ["Trained on clouds."]).splitlines()
    assert header.split() == " ".join(HEADER).split()
    assert set(rule) == {"-", " "}
    assert " ".join(row.split()) == "replace 8 → 8 4 of 8 600.0 KB 1.2 MB 0 B 0.25 1.50 0.75 32 held: same bits"
    assert "uninterrupted" in "\n".join(rest)
    assert rest[-1] == "Trained on clouds."


def test_the_tolerance_is_stated() -> None:
    """The text has the tolerance of "same loss"."""
    assert f"{LOSS_TOLERANCE:g}" in render([replace(HELD, promise="same loss")], [])


def test_a_failed_verdict_has_its_reasons() -> None:
    """A failed verdict has its reasons in the table and in JSON."""
    bad = replace(HELD, problems=("rank 3 loaded nothing",))
    assert "FAILED: same bits" in render([HELD, bad], [])
    assert "replace: rank 3 loaded nothing" in render([HELD, bad], [])
    value = as_json(plan_drill(DrillOptions()), [HELD, bad], data="clouds", seconds=1.0)
    assert value["held"] is False
    assert [line["held"] for line in value["scenarios"]] == [True, False]
    assert value["scenarios"][1]["problems"] == ("rank 3 loaded nothing",)


def test_a_scenario_that_could_not_be_carried_out_is_shown() -> None:
    """Its seconds are a dash, and it did not hold."""
    run = plan_drill(DrillOptions()).runs[0]
    report = report_failure(run, run.resumes[0], "job run-1 ended too early")
    assert not report.held
    assert " - " in render([report], [])


def test_a_lost_cluster_has_its_line() -> None:
    """The objects column has the bytes. The wait before the loss is below the table, unless the scenario failed."""
    lost = replace(
        HELD, scenario="cluster", bytes_local=0, bytes_peer=0, bytes_object=1_850_000, detect_s=None, wait_s=0.3
    )
    row = render([lost], []).splitlines()[2]
    assert " ".join(row.split()) == "cluster 8 → 8 4 of 8 0 B 0 B 1.9 MB 0.25 - 0.75 32 held: same bits"
    assert "cluster: wait() took 0.30 s" in render([lost], [])
    assert "wait()" not in render([replace(lost, problems=("rank 0 has its doubts",))], [])
    assert "wait()" not in render([HELD], [])


def test_a_skipped_scenario_is_a_row_with_a_reason() -> None:
    """A skipped scenario has a row and a reason."""
    skipped = {Scenario.CLUSTER: "the moon is not full"}
    text = render([HELD], [], skipped=skipped)
    assert [line.split() for line in text.splitlines() if line.startswith("cluster ")] == [
        ["cluster", *"-" * (len(HEADER) - 2), "SKIPPED"]
    ]
    assert "cluster: SKIPPED, the moon is not full." in text
    value = as_json(plan_drill(DrillOptions(), has_moto=False), [HELD], data="clouds", seconds=1.0)
    assert list(value["skipped"]) == ["cluster"]


def test_json_is_the_table() -> None:
    """The JSON has every column, and whether all scenarios held."""
    shown = as_json(plan_drill(DrillOptions()), [HELD], data="clouds", seconds=61.23456, object_store="s3://b")
    value = json.loads(json.dumps(shown))
    assert (value["object_store"], value["skipped"]) == ("s3://b", {})
    assert value["held"] is True
    assert value["seconds"] == 61.235
    assert value["scenarios"][0]["bytes_peer"] == 1_250_000


def test_a_drill_without_scenarios_did_not_hold() -> None:
    assert as_json(plan_drill(DrillOptions()), [], data=None, seconds=0.0)["held"] is False


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (1_250_000, "1.2 MB"), (3_210_000_000, "3.21 GB")],
)
def test_sizes_fit_into_a_column(size_bytes: int, text: str) -> None:
    """Sizes have decimal units."""
    assert size(size_bytes) == text
