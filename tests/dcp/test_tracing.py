"""OpenTelemetry spans of a save and a load, collected by the OpenTelemetry SDK."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from replicated_ckpt import ReplicatedReader, ReplicatedWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # DCP warns that there is no process group


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """The exporter of a provider that is installed for this test only. OpenTelemetry lets a program set its provider
    only once.
    """
    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    with mock.patch.object(trace, "_TRACER_PROVIDER", provider):
        yield found


def save(root: Path, checkpoint_id: str = "step-1") -> None:
    dcp.save({"model": torch.rand(1000)}, checkpoint_id=checkpoint_id, storage_writer=ReplicatedWriter(root, copies=1))


def load(root: Path, checkpoint_id: str = "step-1") -> None:
    dcp.load({"model": torch.zeros(1000)}, checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(root))


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("replicated_ckpt."): value for name, value in (span.attributes or {}).items()}


def within(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    times = (outer.start_time, inner.start_time, inner.end_time, outer.end_time)
    assert None not in times
    return list(times) == sorted(times, key=lambda at: at or 0)


def test_a_save_and_a_load_have_spans_with_their_phases(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    """The spans of a save and a load are children of the program's span, and contain the spans of their phases."""
    with trace.get_tracer("program").start_as_current_span("step"):
        save(tmp_path)
        load(tmp_path)
    by_name = {span.name: span for span in exporter.get_finished_spans()}
    phases = {"save": ("plan", "serialise", "write", "fsync", "commit"), "load": ("plan", "read")}
    assert by_name.keys() >= {"step", *(f"replicated_ckpt.{kind}.{one}" for kind in phases for one in phases[kind])}
    step = by_name["step"]
    for kind in phases:
        span = by_name[f"replicated_ckpt.{kind}"]
        assert span.parent is not None
        assert step.context is not None
        assert span.parent.span_id == step.context.span_id
        assert within(span, step)
        found = attributes(span)
        assert (found["checkpoint_id"], found["rank"]) == ("step-1", 0)
        assert found["bytes_written" if kind == "save" else "bytes_local"] > 4000
        for phase in ("plan", *(("commit",) if kind == "save" else ())):
            assert within(by_name[f"replicated_ckpt.{kind}.{phase}"], span)
        assert span.status.is_unset


def test_a_failure_sets_the_status_of_the_span(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    """A failed load sets the span's status to ERROR, and `error.type` to the class of the error."""
    save(tmp_path)
    exporter.clear()
    with pytest.raises(Exception, match="step-2"):
        load(tmp_path, "step-2")
    (span,) = exporter.get_finished_spans()
    assert span.name == "replicated_ckpt.load"
    assert attributes(span)["error.type"] == "CheckpointNotFound"
    assert span.status.status_code is trace.StatusCode.ERROR


def test_a_tracer_that_raises_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tracer that raises does not fail the save. The error is logged."""
    with mock.patch.object(trace, "get_tracer", side_effect=RuntimeError("no tracer today")):
        save(tmp_path)
    load(tmp_path)
    assert "no tracer today" in caplog.text


def test_nothing_imports_opentelemetry(tmp_path: Path) -> None:
    """A save and a load do not import OpenTelemetry unless the program has imported it."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
            del sys.modules[name]
        save(tmp_path)
        load(tmp_path)
        assert not [name for name in sys.modules if name.startswith("opentelemetry")]
