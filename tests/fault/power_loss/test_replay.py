"""The model of a power loss: it allows the losses that replay.py lists, and keeps everything durable."""

from tests.fault.power_loss.operations import ROOT, Disk, Entry, Log, Mark, Names, Operation, Sync, Write
from tests.fault.power_loss.replay import EXHAUSTIVE, SAMPLES, crash_states, kept_subsets

FILE, OTHER, DIRECTORY = 1, 2, 3


def create(name: str, inode: int, directory: int = ROOT) -> Names:
    return Names("create", (((directory, name), inode),))


def rename(source: Entry, target: Entry, inode: int) -> Names:
    return Names("rename", ((source, None), (target, inode)))


def trees_at_the_end(*operations: Operation) -> list[dict[str, bytes | None]]:
    """The possible trees if the power fails after the last of these operations on an empty disk."""
    return [dict(state.tree) for state in crash_states(Log(Disk(), list(operations)), start=len(operations))]


def test_an_fsync_of_a_file_keeps_its_bytes_and_not_its_name() -> None:
    """Only an fsync of the directory makes the name durable."""
    written = create("a", FILE), Write(FILE, 0, b"data"), Sync(FILE)
    assert trees_at_the_end(*written) == [{"a": b"data"}, {}]
    assert trees_at_the_end(*written, Sync(ROOT)) == [{"a": b"data"}]


def test_bytes_without_fsync_may_be_lost_in_every_way() -> None:
    """The file has all bytes, the old ones, none, zeros, a first part, or a first part and zeros. Bytes with an fsync
    stay.
    """
    first = create("a", FILE), Write(FILE, 0, b"1234"), Sync(FILE), Sync(ROOT)
    contents = [tree["a"] for tree in trees_at_the_end(*first, Write(FILE, 4, b"5678"))]
    assert contents == [b"12345678", b"1234", b"", b"1234\0\0\0\0", b"123456", b"123456\0\0"]


def test_a_rename_is_atomic_and_may_outrun_the_bytes() -> None:
    """The new name may have none of the bytes. Exactly one of the two names exists."""
    both = create("a", FILE), Sync(ROOT), Write(FILE, 0, b"data"), rename((ROOT, "a"), (ROOT, "b"), FILE)
    trees = trees_at_the_end(*both)
    assert {"b": b""} in trees
    assert all(len(tree) == 1 for tree in trees)
    assert [set(tree) for tree in trees_at_the_end(*both, Sync(FILE), Sync(ROOT))] == [{"b"}]


def test_an_exchange_is_atomic() -> None:
    """Both names change, or neither."""
    names = (((ROOT, "a"), OTHER), ((ROOT, "b"), FILE))
    made = create("a", FILE), create("b", OTHER), Write(FILE, 0, b"1"), Sync(FILE), Sync(ROOT)
    assert trees_at_the_end(*made, Names("exchange", names)) == [{"a": b"", "b": b"1"}, {"a": b"1", "b": b""}]


def test_changes_of_one_name_keep_their_order_and_others_do_not() -> None:
    """A name cannot be removed before it was created. Another name may survive alone."""
    names = create("a", FILE), create("b", OTHER), Names("unlink", (((ROOT, "a"), None),))
    assert sorted(sorted(tree) for tree in trees_at_the_end(*names)) == [[], ["a"], ["a", "b"], ["b"]]
    again = *names, Sync(ROOT), create("a", DIRECTORY), Names("unlink", (((ROOT, "a"), None),))
    assert sorted(sorted(tree) for tree in trees_at_the_end(*again)) == [["a", "b"], ["b"]]


def test_a_move_between_directories_needs_the_fsync_of_both() -> None:
    """In the model, the fsync of one directory is not enough."""
    made = Names("mkdir", (((ROOT, "d"), DIRECTORY),)), create("a", FILE), Sync(ROOT)
    move = rename((ROOT, "a"), (DIRECTORY, "b"), FILE)
    for one in (ROOT, DIRECTORY):
        assert len(trees_at_the_end(*made, move, Sync(one))) == 2
    assert trees_at_the_end(*made, move, Sync(ROOT), Sync(DIRECTORY)) == [{"d": None, "d/b": b""}]


def test_what_is_in_a_lost_directory_is_lost() -> None:
    """The directory's own fsync does not keep its name in the parent."""
    made = Names("mkdir", (((ROOT, "d"), DIRECTORY),)), create("a", FILE, DIRECTORY), Sync(FILE), Sync(DIRECTORY)
    assert trees_at_the_end(*made) == [{"d": None, "d/a": b""}, {}]


def test_every_moment_is_replayed_with_what_was_promised_by_then() -> None:
    """An equal tree is a new state once a promise has changed."""
    log = Log(Disk(), [Mark("x", ("old",)), create("a", FILE), Sync(ROOT), Mark("x", ("new",))])
    found = [(sorted(state.tree), state.promises["x"]) for state in crash_states(log)]
    assert found == [([], ("old",)), (["a"], ("old",)), (["a"], ("new",))]


def test_many_pending_changes_are_sampled_within_bounds() -> None:
    """Up to EXHAUSTIVE changes, all legal subsets are tried. Beyond that: none, all, each kept alone, each lost alone,
    and a sample.
    """
    few = [create(f"{number}", number + 1) for number in range(EXHAUSTIVE)]
    assert len(set(kept_subsets(few, 0))) == 2**EXHAUSTIVE
    many = [create(f"{number}", number + 1) for number in range(EXHAUSTIVE + 5)]
    subsets = list(kept_subsets(many, 0))
    assert len(subsets) == 2 + 2 * len(many) + SAMPLES
    assert {frozenset(), frozenset(range(len(many))), frozenset({3}), frozenset(range(1, len(many)))} <= set(subsets)
    assert subsets == list(kept_subsets(many, 0)), "the sample depends on more than the seed"
