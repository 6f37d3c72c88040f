"""The error catalogue: a test raises every class, and every message has a next step."""

import ast
import pickle
import re
from functools import cache
from pathlib import Path

import pytest

from replicated_ckpt import errors
from replicated_ckpt.errors import (
    CheckpointNotFound,
    ObjectMissing,
    ObjectUnsafe,
    ReplicatedCkptError,
    ReplicatedCkptWarning,
    ShardLost,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    UploadFailed,
)
from replicated_ckpt.wording import plural

TESTS = Path(__file__).resolve().parents[1]
CLASSES = sorted(
    (
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ReplicatedCkptError | ReplicatedCkptWarning)
    ),
    key=lambda kind: kind.__name__,
)
_EXPECTING = {"raises", "warns", "isinstance"}
PACKAGE = TESTS.parent / "replicated_ckpt"
TRANSLATED = {"TokenInvalid", "AlreadyServed"}
"""TokenInvalid becomes HTTP status 401, for which clients raise StoreDenied; AlreadyServed becomes an exit code."""
CONVERSIONS = ("dcp/convert", "stores/output")
_DEFAULT_UNTIL = {"ObjectCorrupt": 4, "ObjectMissing": 4, "StoreError": 4}  # a hint is a later argument than these


def expected_in(text: str) -> set[str]:
    """The classes that a test module expects: in `raises`, `warns` or `isinstance`, or as text in a comparison."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _EXPECTING:
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if isinstance(node, ast.Compare):
            names |= set(re.findall(r"\w+", ast.unparse(node)))
    return names


@cache
def expected_in_tests() -> set[str]:
    return {name for path in TESTS.rglob("test_*.py") for name in expected_in(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_is_raised_in_a_test(kind: type) -> None:
    """Some test expects each error class."""
    assert kind.__name__ in expected_in_tests()


def classes_outside_errors() -> set[str]:
    """The package's error classes that are defined outside errors.py."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py") if path.name != "errors.py"]
    bases_by_name = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    ours = {kind.__name__ for kind in CLASSES}
    return {name for name, bases in bases_by_name.items() if bases & ours}


def test_each_class_outside_errors_is_raised_in_a_test() -> None:
    """Some test expects each error class defined outside errors.py."""
    found = classes_outside_errors()
    assert found
    assert found - TRANSLATED - expected_in_tests() == set()


@pytest.mark.parametrize(
    "path", sorted(path for room in CONVERSIONS for path in (PACKAGE / room).rglob("*.py")), ids=str
)
def test_conversions_use_no_hint_about_other_copies(path: Path) -> None:
    """Conversions read and write a single copy: their errors do not use default hints about other copies."""
    calls = [
        node.exc
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    default = [ast.unparse(call) for call in calls if len(call.args) <= _DEFAULT_UNTIL.get(ast.unparse(call.func), -1)]
    assert default == []


def test_a_class_that_no_test_expects_is_found() -> None:
    """The check can fail: importing a name does not count as expecting it."""
    assert "StoreFull" not in expected_in("from replicated_ckpt.errors import StoreFull\nstore = StoreFull\n")
    assert "StoreFull" in expected_in("with pytest.raises(StoreFull):\n    f()\n")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_has_a_next_step_and_a_contract(kind: type) -> None:
    """Each class has a docstring and a default hint that are sentences."""
    assert (kind.__doc__ or "").strip().endswith((".", "`."))
    if issubclass(kind, ReplicatedCkptError):
        assert re.match(r"[A-Z].*\.$", kind.default_hint, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "node", "0 nodes"),
        (1, "node", "1 node"),
        (2, "copy", "2 copies"),
        (1, "copy", "1 copy"),
        (3, "byte", "3 bytes"),
    ],
)
def test_counts_have_their_plural(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_a_loss_counts_its_shards() -> None:
    """The message has the number of shards, with the right plural."""
    assert "no intact copy of 1 shard is left" in str(ShardLost("step-1", {"a": "node x"}, ["x"]))
    assert "no intact copy of 2 shards is left" in str(ShardLost("step-1", {"a": "node x", "b": "node x"}, ["x"]))


def test_the_hint_after_a_loss_is_about_nodes_that_did_not_answer() -> None:
    """The hint of ShardLost names nodes that did not answer, or no node if all answered.

    For unreadable files the hint is about permissions or limits, not about loss.
    """
    asked = "node a at /nvme (own store)"
    denied = ShardLost(
        "step-1", {"s": "node a"}, [asked, "node a: open 's' at /nvme: PermissionError: Permission denied"]
    )
    assert denied.hint.startswith("Give the loading user read permission")
    short = ShardLost("step-1", {"s": "node a"}, [asked, "node a: open 's' at /nvme: OSError: Too many open files"])
    assert short.hint.startswith("A file could not be read")
    absent = ShardLost("step-1", {"s": "node b"}, [asked, "node b at 10.0.0.2:1: not reached (no answer)"])
    assert absent.hint.startswith("Bring back node b at 10.0.0.2:1, with the store, and load again")
    assert ShardLost("step-1", {"s": "node a"}, [asked]).hint.startswith("No searched store has it")
    assert ShardLost("step-1", {"s": "node a"}, []).hint.startswith("Bring back the nodes of the checkpoint")


def test_a_loss_of_latest_does_not_advise_latest() -> None:
    """The hint after a load of `latest` does not suggest `latest`, also after pickling."""
    lost = ShardLost("step-1", {"s": "node a"}, [], is_latest=True)
    assert "latest" not in pickle.loads(pickle.dumps(lost)).hint
    assert '"latest" takes' in ShardLost("step-1", {"s": "node a"}, []).hint


def test_a_store_error_ends_with_one_full_stop() -> None:
    """A detail that is a sentence adds no second full stop."""
    assert StoreFull("/nvme", "write", "x", "OSError: No space left.").message.endswith("No space left.")
    assert StoreFull("/nvme", "write", "x", "OSError: No space left.").message[-2] != "."


def test_a_store_error_does_not_repeat_its_class() -> None:
    """The message does not repeat the class that the traceback shows. Without a detail, it has the class. A place that
    is also the key appears once.
    """
    full = StoreFull("/nvme", "write", "x", "No space left")
    relayed = StoreFull("node-b", "POST", "/v1/saves", full.message)
    assert relayed.message == "POST '/v1/saves' at node-b: write 'x' at /nvme: No space left."
    assert ObjectMissing("/nvme", "read", "x").message == "read 'x' at /nvme: ObjectMissing."
    assert StoreDenied("/nvme", "look at", "/nvme", "no").message == "look at /nvme: no."


def test_a_missing_checkpoint_names_unreached_nodes() -> None:
    """If nodes did not answer, the hint is to bring them back, not to check the id."""
    error = CheckpointNotFound("No checkpoint 'x' was found.", unreached=["node b at 10.0.0.2:1"])
    assert "Bring them back" in error.hint
    assert "node b at 10.0.0.2:1" in error.hint
    assert "ls" in CheckpointNotFound("No checkpoint 'x' was found.").hint


def test_an_upload_keeps_the_hint_of_its_last_try() -> None:
    """UploadFailed ends with the hint of the bucket's error, and has no other."""
    cause = StoreUnavailable("s3://b", "write", "k", "timed out", "Open port 9000.")
    error = UploadFailed("step-1", "s3://b", str(cause))
    assert error.hint == "Open port 9000."
    assert str(error).count("Hint:") == 1


def test_no_name_in_an_error_controls_a_terminal() -> None:
    """Control characters in names from checkpoints and peers are escaped, also after pickling."""
    evil = "m\x1b]0;owned\x07\x1b[2J\nFAKE: all is well\n\udcff"
    for error in (
        ReplicatedCkptError(evil, evil),
        CheckpointNotFound(evil, unreached=[evil]),
        ShardLost("step-1", {evil: evil}, [evil]),
        ObjectUnsafe(evil, evil, [(evil, evil)], evil),
        UploadFailed("step-1", "s3://b/x", evil),
    ):
        for one in (error, pickle.loads(pickle.dumps(error))):
            assert str(one).isprintable()
            assert r"\x1b[2J\nFAKE: all is well\n\udcff" in str(one)


def test_no_name_in_a_hint_is_code() -> None:
    """A hint with a line to copy has only valid names of modules and classes."""
    line = "`import pathlib; torch.serialization.add_safe_globals([pathlib.PosixPath])`"
    assert line in ObjectUnsafe("x", "shard", [("pathlib", "PosixPath")]).hint
    evil = ObjectUnsafe("x", "shard", [("os; os.system('evil')", "y")])
    assert evil.hint == ObjectUnsafe.default_hint
