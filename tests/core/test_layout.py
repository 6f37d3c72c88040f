"""Names: which ids and file names from users and peers are valid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.layout import ShardName, checkpoint_id_under, is_checkpoint_file, is_checkpoint_id
from replicated_ckpt.errors import ConfigInvalid


@pytest.mark.parametrize(
    "text",
    [
        "step-10",
        "run/step-10",
        "2026-11-21_19:33",
        "a.b",
        "x=1,y=2",
        "my run/step 10",
        "größe/Größe",
        "#1",
        "it's",
        "step (1)",
        "実験/10",
        "a&b;c!",
        "/".join("abcdefgh"),
    ],
)
def test_plain_names_are_ids(text: str) -> None:
    """An id is one or more plain parts."""
    assert is_checkpoint_id(text)
    assert checkpoint_id_under("/nvme/ckpt", text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "/",
        ".hidden",
        "a/.b",
        "latest",
        "run/latest",
        "node.json",
        "x\0",
        "a\n",
        "./latest",
    ]
    + [" a", "a ", "-a", "~a", "a\u202eb", "a\u200bb", "a\ud800", "ü" * 101, "/".join(["ü" * 90] * 3)]
    + ["/".join("abcdefghi")]
    + [f"a{character}b" for character in '*?[]{}<>|"`\\^%$'],
)
def test_invalid_names_are_refused(text: str) -> None:
    """Hidden, reserved and over-long names, `..` and special characters are refused."""
    assert not is_checkpoint_id(text)
    with pytest.raises(ConfigInvalid):
        checkpoint_id_under("/nvme/ckpt", text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("./", "it is empty"),
        ("../x", "'..' starts with '.'"),
        ("run/-a", "'-a' starts with '-'"),
        ("run /b", "'run ' ends with a space"),
        ("latest", "the name is reserved"),
        ("run/latest", "the name is reserved"),
        ("a\n", "it contains a control character"),
        ("run/a*[1]", "'a*[1]' contains * [ ]"),
        ("x" * 201, f"'{'x' * 201}' is too long"),
        ("/".join(["x" * 190] * 3), "it has more than 512 bytes"),
        ("/".join("abcdefghi"), "it has more than 8 parts"),
        ("a.distcp", "'a.distcp' ends like a shard name"),
    ],
)
def test_the_error_has_the_reason_for_a_refused_name(text: str, why: str) -> None:
    """The message has the reason for this name."""
    with pytest.raises(ConfigInvalid) as raised:
        checkpoint_id_under("/nvme/ckpt", text)
    assert raised.value.message.endswith(f": {why}.")


@pytest.mark.parametrize("text", ["./run/step-1", "run//step-1", "run/./step-1/", ".//run///step-1"])
def test_a_name_is_normalized_like_a_path(text: str) -> None:
    """In a user's argument, empty parts and `.` are dropped. Peers and disks have only the normalized name."""
    assert checkpoint_id_under("/nvme/ckpt", text) == "run/step-1"
    assert not is_checkpoint_id(text)


def test_an_absolute_path_inside_the_root_means_the_name_under_it() -> None:
    """An absolute path inside the root is accepted as the id below it. Other paths are refused."""
    assert checkpoint_id_under("/nvme/ckpt", "/nvme/ckpt/run/step-1") == "run/step-1"
    assert checkpoint_id_under("/nvme/ckpt/", "/nvme/ckpt/step-1/") == "step-1"
    for outside in ("/nvme", "/nvme/ckpt", "/nvme/ckpt2/step-1", "/nvme/ckpt/../x"):
        with pytest.raises(ConfigInvalid):
            checkpoint_id_under("/nvme/ckpt", outside)


@given(st.text(max_size=30))
def test_every_id_stays_under_the_root(text: str) -> None:
    """Every accepted text names a path below the root without hidden parts."""
    try:
        checkpoint_id = checkpoint_id_under("/root/store", text)
    except ConfigInvalid:
        return
    assert all(part and not part.startswith(".") for part in checkpoint_id.split("/"))


def test_shard_names_are_those_of_dcp() -> None:
    """A shard's name consists of rank and index."""
    assert str(ShardName(3, 0)) == "__3_0.distcp"
    assert ShardName.parse("__12_3.distcp") == ShardName(12, 3)
    for text in ("__01_0.distcp", "__1_0.distcp.part", "_1_0.distcp", "__1_0.distcp/..", "__-1_0.distcp"):
        assert ShardName.parse(text) is None
        assert not is_checkpoint_file(text)
