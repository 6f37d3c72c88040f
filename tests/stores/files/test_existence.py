"""If the system refuses to answer about a path, the path is never treated as missing, on any Python."""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.repair.scrub import Scrubber
from replicated_ckpt.cli.look.given_root import open_store
from replicated_ckpt.core.layout import MANIFEST_NAME, NODE_NAME
from replicated_ckpt.core.upkeep.repair_plan import Finding
from replicated_ckpt.errors import ConfigInvalid, StoreDenied, StoreError
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.files import existence
from replicated_ckpt.stores.local.inspection import Inspector
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.publish import is_checkpoint
from replicated_ckpt.stores.throttle import Pace
from tests.stores.local.test_local import SHARD, save_id, staged

ASKED: dict[str, Callable[[Path], bool]] = {
    "exists": existence.is_there,
    "is_dir": existence.is_directory,
    "is_file": existence.is_plain_file,
    "is_symlink": existence.is_link,
}
STAGED = save_id(1)


@pytest.fixture
def python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """Path's methods as in Python 3.14: False on any error. Source: CPython 3.14, What's New, pathlib."""
    for name in ASKED:
        original = getattr(Path, name)

        def answer(path: Path, *args: Any, original: Callable[..., bool] = original, **named: Any) -> bool:
            try:
                return original(path, *args, **named)
            except OSError:
                return False

        monkeypatch.setattr(Path, name, answer)


@contextmanager
def refused(path: Path, code: int) -> Iterator[None]:
    """stat, lstat and open of `path` and of paths below it fail with this errno."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: Any, *args: Any, **named: Any) -> Any:
            if isinstance(name, str | os.PathLike) and whole(name, named.get("dir_fd")).is_relative_to(path):
                raise OSError(code, os.strerror(code), str(name))
            return original(name, *args, **named)

        return call

    def whole(name: str | os.PathLike[str], directory: int | None) -> Path:
        return Path(name) if directory is None else Path(f"/proc/self/fd/{directory}").readlink() / name

    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat", "lstat", "open"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        yield


@pytest.mark.parametrize("asked", ASKED)
def test_a_refusal_of_the_system_raises(tmp_path: Path, asked: str, python_3_14: None) -> None:
    """Each function returns what Path's method returns, and raises if the system refuses to answer."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("directory", "file", "link", "nowhere", "circle", "missing", "file/below"):
        path = tmp_path / name
        assert ASKED[asked](path) == getattr(path, asked)(), name
        assert existence.is_name_taken(path) == os.path.lexists(path), name
    with refused(tmp_path / "file", errno.ESTALE):
        for ask in (ASKED[asked], existence.is_name_taken):
            with pytest.raises(OSError, match="Stale"):
                ask(tmp_path / "file")


def check_no_identity_is_made(store: LocalStore) -> None:
    with refused(store.root / NODE_NAME, errno.EACCES), pytest.raises(StoreDenied, match=r"node\.json"):
        store.node_id()


def check_a_root_is_unreadable(store: LocalStore) -> None:
    with refused(store.root, errno.EACCES), pytest.raises(StoreDenied):
        store.node_id()
    with refused(store.root, errno.EACCES), pytest.raises(StoreDenied):
        store.agent_directory()


def check_a_staged_save_is_not_absent(store: LocalStore) -> None:
    """`absent` would mean that this node did not publish the save: other nodes would delete theirs."""
    service = NodeService(store)
    with refused(store.staging(STAGED), errno.EACCES), pytest.raises(StoreDenied):
        service.state_of(STAGED)
    with refused(store.staging(STAGED), errno.EACCES), pytest.raises(StoreDenied):
        service.check_open(STAGED)


def check_a_decided_save_is_not_aborted(store: LocalStore) -> None:
    with refused(store.staging(STAGED) / MANIFEST_NAME, errno.EMFILE), pytest.raises(StoreError, match="open files"):
        store.abort(STAGED, unless_decided=True)
    assert store.is_decided(STAGED)
    with refused(store.staging(STAGED) / MANIFEST_NAME, errno.EIO):
        assert store.is_decision_damaged(STAGED)
        assert not store.is_decided(STAGED)


def check_a_checkpoint_is_one(store: LocalStore) -> None:
    store.commit(STAGED)
    with refused(store.root / "step-1" / ".metadata", errno.EIO), pytest.raises(OSError, match="Input/output"):
        is_checkpoint(store.root / "step-1")
    with refused(store.root / NODE_NAME, errno.EACCES), pytest.raises(ConfigInvalid, match="is one checkpoint"):
        open_store(str(store.root / "step-1"))


def check_an_unread_shard_is_not_damaged(store: LocalStore) -> None:
    """Otherwise `verify` would suggest to remove an intact shard, and the scrub would mark it."""
    store.commit(STAGED)
    for name, code in itertools.product((SHARD, ".metadata"), (errno.EACCES, errno.EMFILE)):
        inspector = Inspector(store, store.node_id())
        with refused(store.root / "step-1" / name, code), pytest.raises(StoreError) as raised:
            list(inspector.inspect())
        assert isinstance(raised.value, StoreDenied) == (code == errno.EACCES)
        if code == errno.EACCES:
            assert f"read and write {store.root}/step-1/{name} " in raised.value.hint
        bad: list[Finding] = []
        stopping = threading.Event()
        scrubber = Scrubber(store, store.node_id(), Pace(1e9, stopping), stopping, 1.0, bad.append, DamageBook(store))
        with refused(store.root / "step-1" / name, code):
            assert scrubber.scrub().passes == 1
        assert bad == []
        with refused(store.root / "step-1" / name, errno.EIO):
            assert [found.name for found in Inspector(store, store.node_id()).inspect()] == [name]
    assert list(Inspector(store, store.node_id()).inspect()) == []


CHECKS = (
    check_an_unread_shard_is_not_damaged,
    check_no_identity_is_made,
    check_a_root_is_unreadable,
    check_a_staged_save_is_not_absent,
    check_a_decided_save_is_not_aborted,
    check_a_checkpoint_is_one,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_path_that_cannot_be_read_is_not_missing(
    tmp_path: Path, check: Callable[[LocalStore], None], python_3_14: None
) -> None:
    """While the system refuses, no new identity is made, no save is absent or aborted, and no file changes."""
    store = LocalStore(tmp_path / "root")
    node_id = store.node_id()
    staged(store, 1, b"data")
    names = sorted(path.relative_to(store.root) for path in store.root.rglob("*"))
    check(store)
    assert store.node_id() == node_id
    if check not in (check_a_checkpoint_is_one, check_an_unread_shard_is_not_damaged):
        left = {path.relative_to(store.root) for path in store.root.rglob("*")}
        assert left >= set(names)
        store.commit(STAGED)
    assert [name for name, _ in store.catalog.committed()] == ["step-1"]


def test_a_name_without_links_is_looked_at_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`leads_out` checks only the parts below the root, one stat each, not the whole path from `/`."""
    deep = tmp_path / "a" / "b" / "c"
    (deep / "run" / "step-1").mkdir(parents=True)
    asked: list[str] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **named: Any) -> Any:
            asked.append(str(path))
            return original(path, *args, **named)

        return call

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    assert not existence.leads_out(deep, "run/step-1")
    assert len(asked) == 2
    assert existence.leads_out(deep, "run/../../step-1")
