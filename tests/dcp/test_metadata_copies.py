"""`.metadata` is scanned once in a load; whatever differs from what was scanned is scanned again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.metadata_copies import scanned, verified_metadata
from replicated_ckpt.dcp.pickle_scan import scan
from replicated_ckpt.dcp.survey import Survey, Surveyor
from replicated_ckpt.stores.local import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    dcp.save({"a": torch.ones(3)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    return LocalStore(tmp_path)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what was scanned from here on."""
    sizes: list[int] = []

    def counted(raw: bytes, *rest: object) -> None:
        sizes.append(len(raw))
        scan(raw, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("replicated_ckpt.dcp.metadata.scan", counted)
    return sizes


def survey_of(store: LocalStore) -> Survey:
    return Surveyor(store, store.known_node_id(), []).surveyed("step-1")


def test_what_the_coordinator_has_scanned_is_not_scanned_again(store: LocalStore, scans: list[int]) -> None:
    """A rank with the very bytes that were scanned unpickles them; the survey brings their digest to it."""
    survey = Survey.from_json(scanned(store, survey_of(store), None, "rank 0").to_json())
    assert len(scans) == 1
    assert "a" in verified_metadata(store, survey, None, "rank 1").state_dict_metadata
    assert len(scans) == 1


def test_other_bytes_are_scanned(store: LocalStore, scans: list[int]) -> None:
    """A digest of anything else, and none at all, save nobody the scan."""
    for digest in ("0" * 64, ""):
        verified_metadata(store, replace(survey_of(store), scanned_sha256=digest), None, "rank 1")
    assert len(scans) == 2


def test_metadata_that_nobody_could_scan_is_left_to_each_rank(store: LocalStore) -> None:
    """The coordinator's trouble with its own copy is no answer for the others."""
    (store.final("step-1") / ".metadata").unlink()
    assert scanned(store, survey_of(store), None, "rank 0").scanned_sha256 == ""


def test_one_process_alone_scans(store: LocalStore, scans: list[int]) -> None:
    """Without a coordinator a process does it itself."""
    state = {"a": torch.zeros(3)}
    dcp.load(state, checkpoint_id="step-1", storage_reader=ReplicatedReader(store.root))
    assert len(scans) == 1
    assert torch.equal(state["a"], torch.ones(3))
