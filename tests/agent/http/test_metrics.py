"""Metrics: what a scraper gets about a node, its ranks and the cluster."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replicated_ckpt.agent.http.metrics import Family, histogram, render
from replicated_ckpt.core.rank_report import RankReport
from replicated_ckpt.dcp.runtime.agent_report import send_report
from replicated_ckpt.errors import StoreFull
from replicated_ckpt.node.state.rank_reports import BOUNDS_S, Figures, Histogram
from replicated_ckpt.stores.local.memory_tier import note_memory_tier
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent, wait_for
from tests.agent.checkpoints import checkpointed
from tests.agent.scraping import scrape, scraped

SAVE = RankReport("save", "run/step-1", "b" * 32, 0, "host-a", 1e9, 3.0, {"plan": 0.3, "write": 2.0}, {"written": 7})

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "monitoring.md"


def test_a_scraper_gets_the_text_format(tmp_path: Path) -> None:
    """Prometheus' own parser and linter accept the answer. Each metric has a help text and a type."""
    root = tmp_path / "a"
    checkpointed([LocalStore(root)], 1, {"__0_0.distcp": (0,)}, copies=1, size_bytes=1000)
    with running_agent(root) as agent:
        wait_for(lambda: "copies_missing" in scraped(agent) or None, 30, "the first round")
        send_report(LocalStore(root), replace(SAVE, error="StoreFull"))
        wait_for(lambda: scraped(agent).get("errors_total{class=StoreFull,origin=save}"), 10, "the report")
        answer = scrape(agent, "/metrics?cluster=1")
    assert answer.headers.get_content_type() == "text/plain"
    assert answer.headers.get_param("version") == "0.0.4"  # without it, Prometheus 3 refuses the answer
    families = list(text_string_to_metric_families(answer.text))
    assert len(families) > 40
    for family in families:
        assert family.name.startswith("replicated_ckpt_")
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter", "histogram")
    names = {family.name.removeprefix("replicated_ckpt_") for family in families}
    named = set(re.findall(r"`([a-z_]+_[a-z_]+)(?:\{[a-z,]+\})?`", DOCUMENT.read_text()))
    assert {name.removesuffix("_total") for name in named if name not in ("node_", "replicated_ckpt_")} <= names
    if (promtool := shutil.which("promtool")) is not None:
        linted = subprocess.run(
            [promtool, "check", "metrics"], check=False, input=answer.text, capture_output=True, text=True, timeout=60
        )
        assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")


def test_the_metrics_of_a_store(tmp_path: Path) -> None:
    """Bytes by tier, free space, and nothing missing. A checkpoint without a time has no commit timestamp."""
    root = tmp_path / "a"
    checkpointed([LocalStore(root)], 1, {"__0_0.distcp": (0,)}, copies=1, size_bytes=1000)
    checkpointed([LocalStore(tmp_path / "memory")], 2, {"__0_0.distcp": (0,)}, copies=1, size_bytes=5000)
    note_memory_tier(LocalStore(root), tmp_path / "memory")
    with running_agent(root) as agent:
        wait_for(lambda: "copies_missing" in scraped(agent) or None, 30, "the first round")
        found, nodes = scraped(agent), scraped(agent, "/metrics?cluster=1")
    assert found["copies_missing"] == found["shards_lost"] == found["damaged_files"] == 0
    assert found["stored_bytes{tier=node}"] == found["largest_save_bytes"] > 1000
    assert found["stored_bytes{tier=bucket}"] == 0
    assert found["stored_bytes{tier=memory}"] == found["stored_bytes{tier=node}"] + 4000
    assert found["disk_size_bytes"] > found["disk_free_bytes"] > 0
    assert not [name for name in found if name.startswith("last_commit_timestamp_seconds")]
    assert not [name for name in found if name.startswith("node_")]
    assert [name.partition("{")[0] for name in nodes if name.startswith("node_up{")] == ["node_up"]


def test_refusals_are_counted_by_class(tmp_path: Path) -> None:
    """A peer asks for a file that does not exist: the counter of that error class increases."""
    with running_agent(tmp_path / "a") as agent:
        name = "errors_total{class=ObjectMissing,origin=request}"
        assert name not in scraped(agent)
        for _ in range(2):
            with agent.peer() as client, pytest.raises(Exception, match="no such file"):
                client.fetch("GET", "/v1/files/__0_0.distcp")
        assert scraped(agent)[name] == 2


def test_ranks_reports_add_up() -> None:
    """Durations are sorted into buckets. Bytes, divergences and bad copies are summed. Rank 0 counts the saves."""
    figures = Figures()
    figures.add_report(replace(SAVE, divergences=2))
    figures.add_report(replace(SAVE, rank=1, seconds=1000.0, sizes={"written": 5}))
    figures.add_report(replace(SAVE, kind="load", rank=1, bad_copies=3, phases={"read": 1.0}))
    figures.add_report(replace(SAVE, error="AckNotReached"))
    figures.count_error("upload", StoreFull("a bucket", "put", "x", "full"))
    found = figures.read()
    assert found.ended == {"save": 1, "load": 0}
    assert found.sizes == {("save", "written"): 12, ("load", "written"): 7}
    assert (found.divergences, found.bad_copies) == (2, 3)
    assert found.errors == {("save", "AckNotReached"): 1, ("upload", "StoreFull"): 1}
    assert found.phases["save", "plan"].sum_s == pytest.approx(0.6)
    text = render([histogram("x_seconds", "Time.", [({}, found.durations["save"])])]).decode()
    (family,) = text_string_to_metric_families(text)
    by_bound = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    assert list(by_bound) == [*map(str, BOUNDS_S), "+Inf"]
    assert (by_bound["2.5"], by_bound["5.0"], by_bound["500.0"], by_bound["+Inf"]) == (0, 1, 1, 2)


def test_a_bound_belongs_to_its_bucket() -> None:
    """`le` is "less than or equal"."""
    found = Histogram()
    found.add(BOUNDS_S[1])
    assert found.counts[:3] == [0, 1, 0]


def test_the_number_of_classes_is_bounded() -> None:
    """Ranks name the classes of their errors: many classes share one metric."""
    figures = Figures()
    for number in range(1000):
        figures.add_report(replace(SAVE, error=f"E{number}"))
    errors = figures.read().errors
    assert len(errors) == 201
    assert errors["save", "other"] == 800


def test_labels_are_quoted() -> None:
    """Host names and classes come from other processes, and cannot add a line to the answer."""
    value = 'a"b\\c\nreplicated_ckpt_fake 1'
    (family,) = text_string_to_metric_families(
        render([Family("x", "gauge", "X.", [("", {"host": value}, 1)])]).decode()
    )
    assert [sample.labels for sample in family.samples] == [{"host": value}]
