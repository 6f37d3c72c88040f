"""Faults that combine at one node: what it may not drop, although each of its rules alone would let it."""

import contextlib
import os
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
    """All shards of the save are staged here; so is the decision, if it was made."""
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
    """What re-protection sees: this node alone."""
    return (NodeView(service.node_id, Presence.UP, service.holdings(), service.unclaimed.find_files()),)


def is_staged(service: NodeService, save_id: str) -> bool:
    return service.store.staging(save_id).is_dir()


def test_what_another_run_published_lets_nothing_staged_go(service: NodeService) -> None:
    """A save is in doubt that is to replace another lineage's, which is whole: it may be acknowledged, and stays."""
    published = stage(service, OLD, 5, RUN, service.node_id)
    service.commit(OLD)
    stage(service, NEW, 1, ANOTHER, OTHER, is_decided=False)
    settle(service, [StaleSave(service.store.intent_of(NEW), "its processes are gone")], [])
    drop_superseded(service, {OLD: published}, look(service))
    assert is_staged(service, NEW)


@pytest.mark.parametrize("overwrite", [True, False], ids=["overwrites", "found the id free"])
@pytest.mark.parametrize("sequence", [2, 3], ids=["older", "of another job that counted alike"])
def test_a_decided_save_that_was_overtaken_goes_once_the_newer_one_is_whole(
    service: NodeService, sequence: int, *, overwrite: bool
) -> None:
    """It is not kept for ever: it waits for no node, only for the newer one to be seen."""
    stage(service, NEW, sequence, RUN, OTHER, overwrite=overwrite)
    newest = stage(service, NEWEST, 3, RUN, service.node_id)
    service.commit(NEWEST)
    for _ in range(2):
        settle(service, service.find_settleable(0.0), [])
        drop_superseded(service, {NEWEST: newest}, look(service))
    assert not is_staged(service, NEW)


def test_a_save_that_cannot_be_completed_goes_once_a_newer_one_is_whole(service: NodeService, tmp_path: Path) -> None:
    """The node that published it lost its `.metadata` there: it would stay staged as long as that node keeps the rest."""
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
    said = shown.describe(look_at_nodes(service.store, asks_own=False))
    assert f"save {NEW} of step-10: could not be recovered, and is tried again: GET" in said
    assert METADATA_NAME in said
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
def test_a_decided_save_whose_name_another_run_has_taken_goes(
    service: NodeService, sequence: int, kept_by: str
) -> None:
    """Its coordinator's node had decided it, and no node published it: it would be in doubt for ever."""
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


def test_a_decided_save_that_its_coordinators_node_has_given_up_goes(service: NodeService, tmp_path: Path) -> None:
    """Another run's save has its name on both nodes. On the one that did not coordinate it, it was in doubt for ever."""
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
        assert is_staged(service, NEW), "while its coordinator's node has it"
        for node in (coordinator, service):
            drop_superseded(node, {OLD: theirs}, views)
        assert not is_staged(coordinator, NEW)
        settle(service, service.find_settleable(0.0), [])
    assert not is_staged(service, NEW)
    assert service.in_doubt.read_all() == ()


def test_a_decided_save_is_not_given_up_for_a_lost_node(
    service: NodeService, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rank works on it, as was said: another run's save has its name, and it is published once that is renamed.

    Commands say so, too, and do not advise to give up what is not given up.
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
        said = capsys.readouterr().out
        assert f"it is decided, but save {OLD} has its name on this node" in said
        assert "--lost" not in said
        assert "to do: abort" not in said
    (service.store.root / "step-10").rename(service.store.root / "theirs")
    assert settling.abort_lost(service, NEW, [OTHER]) == ()
    assert service.store.catalog.checkpoint_of(NEW) == "step-10"
    assert service.store.catalog.checkpoint_of(OLD) == "theirs"


def test_what_a_crash_left_of_a_save_that_was_published_and_retired_goes(service: NodeService) -> None:
    """Its description alone lies here, and another node has the save: there is nothing that could be completed."""
    service.store.begin(Intent(NEW, "step-10", "repair", overwrite=True))
    service.store.staging(NEW).rmdir()
    with mock.patch.object(settling, "_ask", return_value=Answer.PUBLISHED):
        settle(service, service.find_settleable(0.0), [AgentAddress(OTHER, "127.0.0.1", 1, "token")])
    assert service.store.list_staged() == ()


@pytest.mark.parametrize("damage", ["manifest", "metadata", "metadata is gone"])
def test_a_damaged_decision_is_not_taken_for_none(service: NodeService, damage: str) -> None:
    """Its coordinator's node has decided, cannot read what, and reaches no other: one may have published it."""
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


def test_a_decided_save_that_takes_its_name_is_blocked_by_nothing(service: NodeService) -> None:
    """A crash came between its decision and the name: the next start publishes it over the version that it replaces."""
    stage(service, OLD, 1, RUN, service.node_id)
    service.commit(OLD)
    stage(service, NEW, 2, RUN, service.node_id)
    (shown,) = list_staged_saves(service.store)
    assert (shown.save_id, shown.blocked_by) == (NEW, "")
    service.recover()
    assert service.store.catalog.checkpoint_of(NEW) == "step-10"


def test_a_damaged_checkpoint_keeps_no_save_from_being_given_up(service: NodeService) -> None:
    """Other nodes, which have a part of that save, would wait until the other checkpoint is repaired, perhaps for ever."""
    stage(service, OLD, 1, RUN, service.node_id)
    service.commit(OLD)
    flip(service.store.root / "step-10" / MANIFEST_NAME, 60)
    stage(service, NEW, 2, RUN, service.node_id, is_decided=False)
    for _ in range(2):
        assert service.answer_to_settle(NEW, is_over=True, is_left=True) == {"state": "aborted"}


def test_what_may_be_published_is_not_noted_as_given_up(service: NodeService) -> None:
    """A crash left its description; its manifest was damaged since, and it has a name: nothing tells which save that is."""
    stage(service, NEW, 1, RUN, service.node_id)
    intent = service.store.intent_path(NEW).read_bytes()
    service.commit(NEW)
    service.store.intent_path(NEW).write_bytes(intent)
    flip(service.store.root / "step-10" / MANIFEST_NAME, 60)
    settle(service, service.find_settleable(0.0), [])
    with pytest.raises(ManifestInvalid):
        service.answer_to_settle(NEW, is_over=True, is_left=True)


def test_an_intent_that_cannot_be_read_waits_for_all_known_nodes(service: NodeService) -> None:
    """Whose save it is cannot be told, so each node that was ever met may have published it."""
    stage(service, NEW, 2, RUN, OTHER, is_decided=False)
    service.peers.learn([AgentAddress(OTHER, "127.0.0.1", 1, "token")])
    flip(service.store.intent_path(NEW), 0)
    settle(service, service.find_settleable(0.0), [])
    assert is_staged(service, NEW)


def test_a_decision_that_is_made_while_others_are_asked_counts(service: NodeService) -> None:
    """Another job's save of the same name begins; before its node has heard of all, the first one decides."""
    manifest = stage(service, NEW, 2, RUN, service.node_id, is_decided=False)

    def ask(*_: object) -> dict[str, object]:
        decide(service.store, manifest)
        return {}

    with mock.patch.object(settling, "_answers", ask):
        settle(service, [StaleSave(service.store.intent_of(NEW), "another save began", is_over=True)], [])
    assert is_staged(service, NEW) or service.store.path_of("step-10", NEW, METADATA_NAME).exists()


def test_a_silent_node_is_asked_once_for_all_leftovers(service: NodeService) -> None:
    """Not once for each of them, time-out after time-out."""
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


def test_a_save_of_another_job_leaves_one_whose_ranks_still_plan_open(service: NodeService) -> None:
    """Longer than the grace nobody of this node works on it; nodes of it that are asked say that it goes on."""
    service.open_save(Intent(NEW, "step-10", "one", overwrite=False, nodes=(service.node_id, OTHER), coordinator=OTHER))
    with mock.patch("replicated_ckpt.node.saves.service.OPEN_GRACE_S", 0.0):
        _, stale_saves = service.open_save(Intent(NEWEST, "step-11", "another", overwrite=False))
    assert [(found.intent.save_id, found.is_over) for found in stale_saves] == [(NEW, False)]
    service.check_open(NEW)


def test_a_save_is_young_until_it_is_open(service: NodeService) -> None:
    """A disk that takes a minute to open it leaves its ranks the whole grace all the same."""
    intent, seen = Intent(NEW, "step-10", "one", overwrite=False), list[bool]()

    def open_slowly(_: Intent) -> None:
        with mock.patch("replicated_ckpt.node.saves.service.time.monotonic", return_value=time.monotonic() + 60.0):
            seen.append(service.was_opened_within(5.0, intent))

    with mock.patch.object(service, "open_in_store", open_slowly):
        service.open_save(intent)
    assert seen == [True]
    assert service.was_opened_within(5.0, intent)
    assert not service.was_opened_within(0.0, intent)


def test_a_decision_comes_from_the_first_node_that_gives_it_intact(tmp_path: Path) -> None:
    """Two nodes have published, and one's `.metadata` has a flipped bit: the node that waits takes the other's."""
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
    """Each round tries again; the log has a line when the reason is another one."""
    stage(service, NEW, 2, RUN, OTHER, is_decided=False)
    stale_save = StaleSave(service.store.intent_of(NEW), "its processes are gone")
    for why in ("a bad bit", "a bad bit", "no answer"):
        with mock.patch.object(settling, "_answers", side_effect=PeerProtocolError(why)):
            settle(service, [stale_save], [])
    said = [record.getMessage() for record in caplog.records if "could not recover" in record.getMessage()]
    assert [why in line for why, line in zip(("a bad bit", "no answer"), said, strict=True)] == [True, True]


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
    """A directory that other users may enter: those of pytest are closed again whenever another run of it begins."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_what_a_file_system_keeps_for_itself_blinds_nobody(open_to_others: Path) -> None:
    """A root that is a mount has lost+found, which only root reads: the checkpoints next to it are found."""
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
def test_a_version_that_a_load_was_told_to_read_stays(tmp_path: Path, session: str) -> None:
    """Whatever replaces it, and however sure it is that the newer one is whole: until the pin is over, or the run saves."""
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
    """A save that a newer one has replaced here, which holds fewer shards: the manifest of the newer, where the old is."""
    stage(service, OLD, 1, RUN, service.node_id)
    service.commit(OLD)
    newer = stage(service, NEW, 2, RUN, service.node_id)
    (service.store.staging(NEW) / max(newer.shards)).unlink()
    service.commit(NEW)
    return newer, service.store.root / "step-10" / replaced_name(OLD)


def test_the_manifest_of_a_replaced_version_is_found_where_it_lies(service: NodeService) -> None:
    """Where this node alone has it: else no plan counts or keeps it, and no policy removes it."""
    replace_one(service)
    manifests = ManifestBook(service.store, service.node_id, service.peers).of(look(service))
    assert manifests.keys() == {OLD, NEW}


@pytest.mark.parametrize("is_done", [False, True])
def test_a_replaced_version_that_no_manifest_tells_of_goes_when_all_is_done(
    service: NodeService, *, is_done: bool
) -> None:
    """Its manifest was damaged after it was replaced; while anything is short anywhere it stays.

    A load that was told to read it keeps it no longer than that: where all have their copies, it reads others.
    """
    newer, place = replace_one(service)
    flip(place, 60)
    service.pin(OLD, "session/1")
    drop_superseded(service, {NEW: newer}, look(service), is_done=is_done)
    assert place.exists() is not is_done
    assert (place.with_name(SHARDS[0])).exists() is not is_done


def test_a_replaced_version_of_a_newer_format_stays(service: NodeService) -> None:
    """What this version of the package cannot read is not taken for damaged."""
    newer, place = replace_one(service)
    make_newer(place)
    drop_superseded(service, {NEW: newer}, look(service), is_done=True)
    assert place.exists()
