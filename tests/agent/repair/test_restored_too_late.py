"""Re-protection looks at a directory, fetches what that lacks, and finds another directory under its name."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.repair import mender
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.layout import REPLACED_DIR
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair_plan import RestoreManifest
from replicated_ckpt.stores.files.locks import HeldLock
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.throttle import Pace
from tests.agent.checkpoints import findings
from tests.agent.scattered import ID, loads, scattered
from tests.fault.killed.adopting import found, manifest


def decide_adoption(service: NodeService, save_id: str) -> Manifest:
    save, raw = found(service.store, ID)
    service.begin(Intent(save_id, ID, "adoption", overwrite=True, adopts=True))
    service.store.put_small(save_id, ".metadata", raw)
    decision = manifest(save, save_id, dict(service.adopt(save_id, list(save.holders))), service.node_id)
    service.store.put_small(save_id, ".manifest.json", decision.encode())
    return decision


def test_an_adoption_that_is_published_meanwhile_lies_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes were faster and give its manifest, which is not put into what is replaced: of a save in two places one
    would be mended for ever.
    """
    service, save_id = NodeService(LocalStore(tmp_path / "node")), "f" * 32
    store = service.store
    scattered([store], tmp_path)
    decision = decide_adoption(service, save_id)

    def fetch(*_: Any) -> tuple[Manifest, bytes]:
        with HeldLock(os.open(store.root / ID, os.O_RDONLY)) as reader:  # so what is replaced is kept
            assert reader.try_take(shared=True)
            service.commit(save_id)
        return decision, decision.encode()

    monkeypatch.setattr(mender, "fetch_manifest", fetch)
    monkeypatch.setattr(mender, "fetch_metadata", lambda *_: (store.root / ID / ".metadata").read_bytes())
    mender.Mender(service, Pace(1e15, threading.Event())).carry_out(RestoreManifest(service.node_id, ID, save_id, ()))
    assert (store.root / REPLACED_DIR / save_id).is_dir()
    assert not (store.root / REPLACED_DIR / save_id / ".manifest.json").exists()
    assert not store.catalog.is_replaced(save_id)
    assert findings(store) == []
    assert loads(store)
