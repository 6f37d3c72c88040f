"""Renames in a container whose seccomp filter refuses renameat2."""

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from replicated_ckpt.stores.files.durable import exchange, rename_if_free

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000, 0x7FFF0000
_CALLS = {"x86_64": 316, "aarch64": 276}  # renameat2's number


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse_renameat2() -> None:
    """Refuses renameat2 for the rest of this process, as seccomp profiles refuse unknown calls. Source: seccomp(2)."""
    steps = [
        (_LOAD, 0, 0, 0),
        (_JUMP_IF, 0, 1, _CALLS[os.uname().machine]),
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program)) == 0, os.strerror(ctypes.get_errno())


def in_a_filtered_child(do: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            refuse_renameat2()
            os._exit(0 if do() else 1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


@pytest.mark.skipif(os.uname().machine not in _CALLS, reason="the number of the call is not known here")
def test_a_seccomp_filter_counts_as_a_missing_renameat2(tmp_path: Path) -> None:
    """EPERM from a seccomp filter counts as a missing renameat2, and fails no overwrite."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert not in_a_filtered_child(lambda: exchange(tmp_path / "a", tmp_path / "b"))
    assert not in_a_filtered_child(lambda: rename_if_free(tmp_path / "a", tmp_path / "b"))
    assert in_a_filtered_child(lambda: rename_if_free(tmp_path / "a", tmp_path / "c"))
    assert (tmp_path / "c").is_dir()


def test_another_refusal_is_an_error(tmp_path: Path) -> None:
    """Any other error of renameat2 is raised."""
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="No such file"):
        exchange(tmp_path / "a", tmp_path / "missing")
