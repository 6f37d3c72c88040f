"""Names in a store or in an answer of a peer cannot control the terminal or forge a line of output."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.audit import NodeReading
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, NodeEntry, UploadEntry, decode_manifest
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import stop_agent
from tests.agent.checkpoints import METADATA, checkpointed, shard

FORGED = "\x1b]0;x\x07\x1b[2Jwell\nFORGED line\r\x9b31m\u202e"
SAVE = f"{1:032x}"


def with_hostile_text(manifest: Manifest) -> Manifest:
    """The manifest with hostile text in each free field."""
    node = replace(manifest.nodes[0], node_id=FORGED, host=FORGED, domain=FORGED)
    entry = replace(manifest.shards[shard(0)], owner_node=FORGED, holders=(FORGED, manifest.nodes[0].node_id))
    upload = UploadEntry(f"s3://{FORGED}", False, manifest.metadata_bytes, manifest.metadata_crc32c)
    return replace(manifest, nodes=(node, *manifest.nodes), shards={shard(0): entry}, upload=upload)


def with_manifest(store: LocalStore) -> None:
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=1000)
    forged = with_hostile_text(store.catalog.manifest("step-1"))
    (store.root / "step-1" / MANIFEST_NAME).write_bytes(forged.encode())


def with_lost_shard(store: LocalStore) -> None:
    with_manifest(store)
    (store.root / "step-1" / shard(0)).unlink()


def with_intent(store: LocalStore) -> None:
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=1000)
    store.begin(Intent("c" * 32, "step-2", "s", overwrite=False))
    path = store.root / ".staging" / f"{'c' * 32}.json"
    fields = json.loads(path.read_bytes())
    path.write_text(json.dumps({**fields, "checkpoint_id": FORGED, "nodes": [FORGED, "b"]}))


def with_names(store: LocalStore) -> None:
    """Directories and files with hostile names."""
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=1000)
    for name in (FORGED, "step-3"):
        (store.root / name).mkdir()
        (store.root / name / METADATA_NAME).write_bytes(METADATA)
        (store.root / name / f"{FORGED}.distcp").write_bytes(b"x")


WORLDS: dict[str, Callable[[LocalStore], None]] = {
    "a manifest": with_manifest, "a lost shard": with_lost_shard, "an intent": with_intent, "names": with_names,
}  # fmt: skip
VERBS: Sequence[Sequence[str]] = [["ls"], ["status"], ["show", "step-1"], ["show", FORGED], ["upload", "step-1"]]


@pytest.mark.parametrize("world", WORLDS)
def test_hostile_names_in_a_store_forge_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], world: str) -> None:
    """Each command prints only printable lines of its own, as text and as JSON, and raises nothing."""
    store = LocalStore(tmp_path / "root")
    WORLDS[world](store)
    for verb in VERBS:
        for more in ([], ["-o", "json"]) if verb[0] != "upload" else ([],):
            code = main([*verb, "--root", str(store.root), *more])
            printed = capsys.readouterr()
            lines = (printed.out + printed.err).split("\n")
            assert [line for line in lines if not line.isprintable() or line.startswith("FORGED")] == [], verb
            assert code not in (70, 99), printed.err
            assert "Traceback" not in printed.err
    if (store.root / ".agent" / "endpoint.json").exists():  # started by `upload`
        stop_agent(store.root)


def test_hostile_answers_forge_no_line() -> None:
    """Each text of a finding, holding or manifest becomes one printable line. Ordinary text is unchanged."""
    finding = dict.fromkeys(("node_id", "checkpoint_id", "save_id", "name", "path", "expected", "found"), FORGED)
    holding = Holding(FORGED, "step-1", SAVE, 1, has_metadata=True).to_json()
    assert Holding.from_json(holding).node_id.isprintable()
    answer = {"node_id": FORGED, "findings": [{**finding, "problem": "corrupt"}], "holdings": [holding]}
    reading = NodeReading.from_json({**answer, "silent": [holding], "bytes_read": 1}, AgentAddress("b", "h", 1, "t"))
    assert reading.silent[0].node_id.isprintable()
    assert str(reading.findings[0]).isprintable()
    honest = Manifest(SAVE, "x", 1, 0.0, 1, 1, 0, 0, (NodeEntry("b", "höst 1", "rack b", (0,)),), {})
    assert decode_manifest(honest.encode(), "here") == honest
