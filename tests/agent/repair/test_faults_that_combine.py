"""Several faults at one node at the same time: no save that may have been acknowledged is removed."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.cli.look.nodes import look_at_nodes
from replicated_ckpt.cli.look.waiting_saves import list_staged_saves, list_waiting
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, replaced_name
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, PeerProtocolError
from replicated_ckpt.node.peers.manifests import ManifestBook
from replicated_ckpt.node.saves import settle as settling
from replicated_ckpt.node.saves.in_doubt import StaleSave
from replicated_ckpt.node.saves.pins import PIN_S, Pins
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores.local.directories.intent import WRITER, Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import retire
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import running_agent
from tests.agent.checkpoints import next_file_number, renumbered
from tests.agent.collecting import drop_superseded
from tests.damage import flip, make_newer

OTHER = "0" * 11 + "a"
RUN, ANOTHER = "a" * 16, "b" * 16
OLD, NEW, NEWEST = ("1" * 32, "2" * 32, "3" * 32)
SHARDS = ("__0_0.distcp", "__1_0.distcp")
METADATA = b"metadata"


@pytest.fixture
def service(tmp_path: Path) -> NodeService:
    return NodeService(LocalStore(tmp_path / "root"))


def manifest_of(
    save_id: str, sequence: int, lineage: str, nodes: Sequence[str], shards: Sequence[str] = SHARDS
) -> Manifest:
    return Manifest(
        save_id,
        "step-10",
        sequence,
        float(sequence),
        2,
        2,
        len(METADATA),
        crc32c(METADATA),
        tuple(NodeEntry(node, "host", None, (rank,)) for rank, node in enumerate(nodes)),
        {shard: ShardEntry(10, 1, 0, nodes[0], tuple(nodes)) for shard in shards},
        None,
        lineage,
    )


def decide(store: LocalStore, manifest: Manifest) -> None:
    store.put_small(manifest.save_id, METADATA_NAME, METADATA)
    store.put_small(manifest.save_id, MANIFEST_NAME, manifest.encode())


def stage(
    service: NodeService,
    save_id: str,
    sequence: int,
    lineage: str,
    coordinator: str,
    *,
    is_decided: bool = True,
    overwrite: bool = True,
) -> Manifest:
    """Stages all shards of a save on this node and, with `is_decided`, the decision."""
    nodes = (service.node_id, OTHER)
    intent = Intent(save_id, "step-10", "s" + save_id, overwrite, nodes=nodes, coordinator=coordinator)
    shards = [renumbered(shard, next_file_number([service.store], "step-10")) for shard in SHARDS]
    service.store.begin(intent)
    service.store.note_place(save_id, lineage, sequence)
    for shard in shards:
        (service.store.staging(save_id) / shard).write_bytes(b"x" * 10)
    manifest = manifest_of(save_id, sequence, lineage, nodes, shards)
    if is_decided:
        decide(service.store, manifest)
    return manifest


def look(service: NodeService) -> tuple[NodeView, ...]:
    """The view of re-protection on this node alone."""
    return (NodeView(service.node_id, Presence.UP, service.holdings(), service.unclaimed.find_files()),)


def is_staged(service: NodeService, save_id: str) -> bool:
    return service.store.staging(save_id).is_dir()


def test_a_save_of_another_run_does_not_end_a_staged_one(service: NodeService) -> None:
    """An undecided save would replace a complete one of another run. The undecided save may have been acknowledged, so
    it stays.
    """
    published = stage(service, OLD, 5, RUN, service.node_id)
    service.commit(OLD)
    stage(service, NEW, 1, ANOTHER, OTHER, is_decided=False)
    settle(service, [StaleSave(service.store.intent_of(NEW), "its processes are gone")], [])
    drop_superseded(service, {OLD: published}, look(service))
    assert is_staged(service, NEW)


@pytest.mark.parametrize("overwrite", [True, False], ids=["overwrites", "new id"])
@pytest.mark.parametrize("sequence", [2, 3], ids=["older", "same sequence of another job"])
def test_a_decided_save_is_removed_once_a_newer_one_is_complete(
    service: NodeService, sequence: int, *, overwrite: bool
) -> None:
    """A decided save is removed once a newer save of the same checkpoint is seen to be complete. No answer of another
    node is needed.
    """
    stage(service, NEW, sequence, RUN, OTHER, overwrite=overwrite)
    newest = stage(service, NEWEST, 3, RUN, service.node_id)
    service.commit(NEWEST)
    for _ in range(2):
        settle(service, service.find_settleable(0.0), [])
        drop_superseded(service, {NEWEST: newest}, look(service))
    assert not is_staged(service, NEW)


def test_an_unrecoverable_save_is_removed_once_a_newer_one_is_complete(service: NodeService, tmp_path: Path) -> None:
    """The node that published the save lost its `.metadata`, so the save cannot be completed here. A complete newer
    save ends it.
    """
    publisher = NodeService(LocalStore(tmp_path / "publisher"))
    for one in (service, publisher):
        stage(one, NEW, 2, RUN, publisher.node_id, is_decided=one is publisher)
    publisher.commit(NEW)
    (publisher.store.root / "step-10" / METADATA_NAME).unlink()
    newest = stage(service, NEWEST, 3, RUN, service.node_id)
    service.commit(NEWEST)
    with running_agent(publisher.store.root) as agent:
        settle(service, service.find_settleable(0.0), [agent.endpoint.address()])
    assert is_staged(service, NEW)
    (doubt,) = service.in_doubt.read_all()
    (shown,) = list_waiting(service.store, [doubt.to_json()])
    printed = shown.describe(look_at_nodes(service.store, asks_own=False))
    assert f"save {NEW} of step-10: could not be recovered, and is tried again: GET" in printed
    assert METADATA_NAME in printed
    drop_superseded(service, {NEWEST: newest}, look(service))
    assert not is_staged(service, NEW)
    assert service.in_doubt.read_all() == ()


@pytest.mark.parametrize(
    ("sequence", "kept_by"),
    [
        (2, ""),
        (4, "it is the newer one"),
        (2, "a node is silent"),
        (2, "another node has it"),
        (2, "a rank works on it"),
    ],
)
def test_a_decided_save_that_another_run_blocks_is_removed(service: NodeService, sequence: int, kept_by: str) -> None:
    """A decided save that no node published is removed when another run's newer save has its name, unless `kept_by`
    applies.
    """
    mine = stage(service, NEW, sequence, RUN, service.node_id, is_decided=False)
    theirs = stage(service, OLD, 3, ANOTHER, service.node_id)
    service.commit(OLD)
    decide(service.store, mine)
    settle(service, service.find_settleable(0.0), [])
    assert is_staged(service, NEW)
    own = look(service)
    copies = tuple(replace(holding, node_id=OTHER) for holding in own[0].holdings or () if holding.save_id == OLD)
    other = (
        copies if kept_by != "another node has it" else (Holding(OTHER, "step-10", NEW, mine.sequence, True), *copies)
    )
    views = (*own, NodeView(OTHER, Presence.UP, other))
    with contextlib.ExitStack() as stack:
        if kept_by == "a rank works on it":
            stack.callback(service.store.lock_save(NEW).release)
        drop_superseded(service, {OLD: theirs}, views[:1] if kept_by == "a node is silent" else views)
    assert is_staged(service, NEW) is bool(kept_by)


def test_a_decided_save_that_its_coordinator_removed_is_removed(service: NodeService, tmp_path: Path) -> None:
    """Another run's save has the name on both nodes: once the coordinator's node has removed the decided save, the
    other node removes it too.
    """
    coordinator = NodeService(LocalStore(tmp_path / "coordinator"))
    nodes = (service.node_id, coordinator.node_id)
    theirs = manifest_of(OLD, 3, ANOTHER, nodes)
    mine = manifest_of(NEW, 2, RUN, nodes)
    for node in (service, coordinator):
        for manifest, opened in ((mine, True), (theirs, True), (theirs, False), (mine, False)):
            if opened:
                where = coordinator.node_id if manifest is mine else OTHER
                node.store.begin(
                    Intent(manifest.save_id, "step-10", "s", overwrite=True, nodes=nodes, coordinator=where)
                )
                for shard in SHARDS:
                    (node.store.staging(manifest.save_id) / shard).write_bytes(b"x" * 10)
                continue
            decide(node.store, manifest)
            if manifest is theirs:
                node.commit(OLD)
        settle(node, node.find_settleable(0.0), [])
        assert is_staged(node, NEW)
    views = (*look(service), *look(coordinator))
    service.peers.learn([AgentAddress(coordinator.node_id, "127.0.0.1", 1, "token")])

    def ask(*_: object) -> Answer:
        return Answer(coordinator.answer_to_settle(NEW, is_over=False, is_left=False)["state"])

    with mock.patch.object(settling, "_ask", ask):
        settle(service, service.find_settleable(0.0), [])
        assert is_staged(service, NEW), "the coordinator's node still has the save"
        for node in (coordinator, service):
            drop_superseded(node, {OLD: theirs}, views)
        assert not is_staged(coordinator, NEW)
        settle(service, service.find_settleable(0.0), [])
    assert not is_staged(service, NEW)
    assert service.in_doubt.read_all() == ()


def test_a_decided_save_is_not_aborted_for_a_lost_node(
    service: NodeService, capsys: pytest.CaptureFixture[str]
) -> None:
    """`abort_lost` refuses a decided save that is blocked by another run's save, and names the rename that unblocks it.

    The commands print the same, and do not advise `--lost`. After the rename, the save is published.
    """
    mine = stage(service, NEW, 4, RUN, service.node_id, is_decided=False)
    stage(service, OLD, 3, ANOTHER, service.node_id)
    service.commit(OLD)
    decide(service.store, mine)
    with pytest.raises(ConfigInvalid, match=f"it is decided, but save {OLD} has its name") as raised:
        settling.abort_lost(service, NEW, [OTHER])
    assert f"To publish it instead, rename {service.store.root}/step-10" in raised.value.hint
    for command in (["ls"], ["repair", "--dry-run"], ["repair", "--dry-run", "--lost", OTHER]):
        main([*command, "--root", str(service.store.root)])
        printed = capsys.readouterr().out
        assert f"it is decided, but save {OLD} has its name on this node" in printed
        assert "--lost" not in printed
        assert "to do: abort" not in printed
    (service.store.root / "step-10").rename(service.store.root / "theirs")
    assert settling.abort_lost(service, NEW, [OTHER]) == ()
    assert service.store.catalog.checkpoint_of(NEW) == "step-10"
    assert service.store.catalog.checkpoint_of(OLD) == "theirs"


def test_a_stale_intent_of_a_published_save_is_removed(service: NodeService) -> None:
    """Only the intent of a save is left here, and another node has published the save: the intent is removed."""
    service.store.begin(Intent(NEW, "step-10", "repair", overwrite=True))
    service.store.staging(NEW).rmdir()
    with mock.patch.object(settling, "_ask", return_value=Answer.PUBLISHED):
        settle(service, service.find_settleable(0.0), [AgentAddress(OTHER, "127.0.0.1", 1, "token")])
    assert service.store.list_staged() == ()


@pytest.mark.parametrize("damage", ["manifest", "metadata", "metadata is gone"])
def test_a_damaged_decision_is_not_aborted(service: NodeService, damage: str) -> None:
    """The coordinator's node has a decision that it cannot read, and reaches no other node: it does not abort, as
    another node may have published.
    """
    stage(service, NEW, 2, RUN, service.node_id)
    if damage == "manifest":
        flip(service.store.staging(NEW) / MANIFEST_NAME, 60)
    elif damage == "metadata":
        flip(service.store.staging(NEW) / METADATA_NAME, 3)
    else:
        (service.store.staging(NEW) / METADATA_NAME).unlink()
    service.recover()
    settle(service, service.find_settleable(0.0), [])
    assert is_staged(service, NEW)
    assert service.answer_to_settle(NEW, is_over=True, is_left=True)["state"] != "unknown"


def test_a_decided_save_is_published_after_a_crash(service: NodeService) -> None:
    """A crash came after the decision: the next start publishes the save over the version that it replaces."""
    stage(service, OLD, 1, RUN, service.node_id)
    service.commit(OLD)
    stage(service, NEW, 2, RUN, service.node_id)
    (shown,) = list_staged_saves(service.store)
    assert (shown.save_id, shown.blocked_by) == (NEW, "")
    service.recover()
    assert service.store.catalog.checkpoint_of(NEW) == "step-10"


def test_a_save_is_aborted_beside_a_damaged_checkpoint(service: NodeService) -> None:
    """The checkpoint under the same name is damaged. The undecided save is aborted all the same, as other nodes wait
    for the answer.
    """
    stage(service, OLD, 1, RUN, service.node_id)
    service.commit(OLD)
    flip(service.store.root / "step-10" / MANIFEST_NAME, 60)
    stage(service, NEW, 2, RUN, service.node_id, is_decided=False)
    for _ in range(2):
        assert service.answer_to_settle(NEW, is_over=True, is_left=True) == {"state": "aborted"}


def test_a_save_that_may_be_published_is_not_aborted(service: NodeService) -> None:
    """A crash left the intent of a published save, whose manifest is damaged since: the node does not report the save
    as aborted.
    """
    stage(service, NEW, 1, RUN, service.node_id)
    intent = service.store.intent_path(NEW).read_bytes()
    service.commit(NEW)
    service.store.intent_path(NEW).write_bytes(intent)
    flip(service.store.root / "step-10" / MANIFEST_NAME, 60)
    settle(service, service.find_settleable(0.0), [])
    with pytest.raises(ManifestInvalid):
        service.answer_to_settle(NEW, is_over=True, is_left=True)


def test_an_intent_that_cannot_be_read_waits_for_all_known_nodes(service: NodeService) -> None:
    """The nodes of the save are unknown, so each node of the address book may have published it."""
    stage(service, NEW, 2, RUN, OTHER, is_decided=False)
    service.peers.learn([AgentAddress(OTHER, "127.0.0.1", 1, "token")])
    flip(service.store.intent_path(NEW), 0)
    settle(service, service.find_settleable(0.0), [])
    assert is_staged(service, NEW)


def test_a_decision_that_is_made_while_others_are_asked_counts(service: NodeService) -> None:
    """The coordinator decides while this node asks the others: the save is not removed."""
    manifest = stage(service, NEW, 2, RUN, service.node_id, is_decided=False)

    def ask(*_: object) -> dict[str, object]:
        decide(service.store, manifest)
        return {}

    with mock.patch.object(settling, "_answers", ask):
        settle(service, [StaleSave(service.store.intent_of(NEW), "another save began", is_over=True)], [])
    assert is_staged(service, NEW) or service.store.path_of("step-10", NEW, METADATA_NAME).exists()


def test_a_silent_node_is_asked_once_for_all_stale_saves(service: NodeService) -> None:
    """Several stale saves wait for the same silent node: it is asked for one save only."""
    saves = [f"{number:x}" * 32 for number in range(4, 8)]
    nodes = (service.node_id, OTHER)
    for save_id in saves:
        intent = Intent(save_id, f"of-{save_id[0]}", save_id, overwrite=False, nodes=nodes, coordinator=OTHER)
        service.store.begin(intent)
    address = AgentAddress(OTHER, "127.0.0.1", 1, "token")
    with mock.patch.object(settling, "_answers", wraps=settling._answers) as asked:
        settle(service, service.find_settleable(0.0), [address])
    assert [len(call.args[2]) for call in asked.call_args_list] == [1, 0, 0, 0]
    assert all(is_staged(service, save_id) for save_id in saves)


def test_opening_a_save_does_not_close_another_jobs(service: NodeService) -> None:
    """No rank has locked the save within the grace. Another job opens its own save: the first one stays open."""
    service.open_save(Intent(NEW, "step-10", "one", overwrite=False, nodes=(service.node_id, OTHER), coordinator=OTHER))
    with mock.patch("replicated_ckpt.node.saves.service.OPEN_GRACE_S", 0.0):
        _, stale_saves = service.open_save(Intent(NEWEST, "step-11", "another", overwrite=False))
    assert [(found.intent.save_id, found.is_over) for found in stale_saves] == [(NEW, False)]
    service.check_open(NEW)


def test_the_grace_of_a_save_starts_once_it_is_open(service: NodeService) -> None:
    """Opening takes a minute on a slow disk: the grace for the ranks starts afterwards."""
    intent, seen = Intent(NEW, "step-10", "one", overwrite=False), list[bool]()

    def open_slowly(_: Intent) -> None:
        with mock.patch("replicated_ckpt.node.saves.service.time.monotonic", return_value=time.monotonic() + 60.0):
            seen.append(service.was_opened_within(5.0, intent))

    with mock.patch.object(service, "open_in_store", open_slowly):
        service.open_save(intent)
    assert seen == [True]
    assert service.was_opened_within(5.0, intent)
    assert not service.was_opened_within(0.0, intent)


def test_a_decision_comes_from_a_node_with_intact_metadata(tmp_path: Path) -> None:
    """Two nodes have published, one with a damaged `.metadata`: the waiting node takes the other's."""
    services = [NodeService(LocalStore(tmp_path / name)) for name in ("bad", "good", "waiting")]
    nodes, stores = tuple(service.node_id for service in services), [service.store for service in services]
    manifest = manifest_of(NEW, 2, RUN, nodes)
    for store in stores:
        store.begin(Intent(NEW, "step-10", "s" + NEW, overwrite=True, nodes=nodes, coordinator=nodes[0]))
        for shard in SHARDS:
            (store.staging(NEW) / shard).write_bytes(b"x" * 10)
    for service in services[:2]:
        decide(service.store, manifest)
        service.commit(NEW)
    flip(stores[0].root / "step-10" / METADATA_NAME, 3)
    waiting = services[2]
    with running_agent(stores[0].root) as bad, running_agent(stores[1].root) as good:
        peers = [bad.endpoint.address(), good.endpoint.address()]
        settle(waiting, [StaleSave(waiting.store.intent_of(NEW), "its processes are gone")], peers)
    assert (stores[2].root / "step-10" / METADATA_NAME).read_bytes() == METADATA


def test_why_a_save_is_not_settled_is_logged_once(service: NodeService, caplog: pytest.LogCaptureFixture) -> None:
    """Each round tries again. The log has a new line only for a new reason."""
    stage(service, NEW, 2, RUN, OTHER, is_decided=False)
    stale_save = StaleSave(service.store.intent_of(NEW), "its processes are gone")
    for why in ("a bad bit", "a bad bit", "no answer"):
        with mock.patch.object(settling, "_answers", side_effect=PeerProtocolError(why)):
            settle(service, [stale_save], [])
    lines = [record.getMessage() for record in caplog.records if "could not recover" in record.getMessage()]
    assert [why in line for why, line in zip(("a bad bit", "no answer"), lines, strict=True)] == [True, True]


AS_ANOTHER_USER = """
import os, sys
from replicated_ckpt.stores.local.unclaimed import UnclaimedFilesReader
from replicated_ckpt.stores.local.store import LocalStore
os.setgid(1000); os.setuid(1000)
store = LocalStore(sys.argv[1])
unclaimed = UnclaimedFilesReader(store, "n").find_files()
print(len(store.catalog.holdings("n")), len(unclaimed), len(list(store.catalog.without_manifest())))
"""


@pytest.fixture
def open_to_others() -> Iterator[Path]:
    """A directory that other users may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_an_unreadable_lost_and_found_hides_no_checkpoint(open_to_others: Path) -> None:
    """A mount point has a `lost+found` that only root can read: the checkpoints beside it are found."""
    root = open_to_others / "root"
    (root / "lost+found").mkdir(parents=True)
    (root / "lost+found").chmod(0o700)
    (root / "step-1").mkdir()
    (root / "step-1" / METADATA_NAME).write_bytes(b"stock torch's")
    for path in (root, root / "step-1", root / "step-1" / METADATA_NAME):
        os.chown(path, 1000, 1000)
    command = [sys.executable, "-c", AS_ANOTHER_USER, str(root)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.split() == ["0", "1", "1"], done.stderr


@pytest.mark.parametrize("session", ["session", f"session{WRITER}writer"])
def test_a_pinned_version_stays(tmp_path: Path, session: str) -> None:
    """A pinned version stays although a complete newer save has replaced it, until the pin expires or the run saves."""
    now = [0.0]
    service = NodeService(LocalStore(tmp_path / "root"))
    service.pins = Pins(lambda: now[0])
    stage(service, OLD, 1, RUN, service.node_id)
    service.commit(OLD)
    service.pin(OLD, "session/1")
    newest = stage(service, NEW, 2, RUN, service.node_id)
    service.commit(NEW)
    for at, is_there in ((0.0, True), (PIN_S - 1, True), (PIN_S + 1, False)):
        now[0] = at
        drop_superseded(service, {NEW: newest}, look(service))
        assert (service.store.catalog.checkpoint_of(OLD) is not None) is is_there
    service.pin(NEW, "session/1")
    assert not retire(service.store.root, "step-10", NEW)
    service.open_save(
        Intent(NEWEST, "step-11", session, overwrite=False, nodes=(service.node_id,), coordinator=service.node_id)
    )
    assert retire(service.store.root, "step-10", NEW)


def replace_one(service: NodeService) -> tuple[Manifest, Path]:
    """Publishes a save, and over it a newer one without one of its shards. Returns the newer manifest, and the path of
    the older one.
    """
    stage(service, OLD, 1, RUN, service.node_id)
    service.commit(OLD)
    newer = stage(service, NEW, 2, RUN, service.node_id)
    (service.store.staging(NEW) / max(newer.shards)).unlink()
    service.commit(NEW)
    return newer, service.store.root / "step-10" / replaced_name(OLD)


def test_the_manifest_of_a_replaced_version_is_found(service: NodeService) -> None:
    """Without it, no plan and no policy would count the replaced version."""
    replace_one(service)
    manifests = ManifestBook(service.store, service.node_id, service.peers).of(look(service))
    assert manifests.keys() == {OLD, NEW}


def test_a_save_that_is_removed_during_a_look_is_no_warning(
    service: NodeService, caplog: pytest.LogCaptureFixture
) -> None:
    """As when `prune` runs on all nodes at once."""
    stage(service, OLD, 1, RUN, service.node_id)
    service.commit(OLD)
    views = look(service)
    shutil.rmtree(service.store.root / "step-10")
    assert ManifestBook(service.store, service.node_id, service.peers).of(views) == {}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("is_done", [False, True])
def test_a_replaced_version_without_a_manifest_is_removed_at_the_end(service: NodeService, *, is_done: bool) -> None:
    """The manifest of a replaced version is damaged: its files are removed once every checkpoint has its copies.

    A pin does not keep them: a load then finds other copies.
    """
    newer, place = replace_one(service)
    flip(place, 60)
    service.pin(OLD, "session/1")
    drop_superseded(service, {NEW: newer}, look(service), is_done=is_done)
    assert place.exists() is not is_done
    assert (place.with_name(SHARDS[0])).exists() is not is_done


def test_a_replaced_version_of_a_newer_format_stays(service: NodeService) -> None:
    """A manifest of a newer format is not treated as damaged."""
    newer, place = replace_one(service)
    make_newer(place)
    drop_superseded(service, {NEW: newer}, look(service), is_done=True)
    assert place.exists()
