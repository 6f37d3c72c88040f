"""Ownership of a store: its root and its agent's files are trusted only if no other user of the host can have made them."""

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from replicated_ckpt.environment import TRUST_ROOT_ENV, is_switched_on
from replicated_ckpt.errors import ConfigInvalid, StoreDenied
from replicated_ckpt.stores.files.durable import SHARED_MODE, make_root
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.locks import exclusive

GROUP_ENV = "REPLICATED_CKPT_GROUP"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Linux's own limit, MAXSYMLINKS.
_LINKS_MAX = 40
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_UID_MAP = Path("/proc/self/uid_map")


def check_root(root: Path) -> None:
    """Checks that the root is this user's, and that no other user can have replaced it by a directory or link.

    A user who can write a directory can rename its entries, unless it is sticky, as /tmp is. The root may belong to the
    user root if this user can write it, as in a volume that kubelet makes with fsGroup.

    Raises:
        StoreDenied: the check failed; the error names the path, its owner and its mode. OSError
    """
    resolved = _check_above(root, root)
    status = resolved.stat()
    _check_owner(root, resolved, status, _owners_of_root(resolved))
    _check_mode(root, resolved, status)


def _check_above(root: Path, there: Path) -> Path:
    """Checks each step on the way to a directory; returns its path without links."""
    resolved, owners = Path("/"), _owners_above()
    for path, status in _steps(there):
        _check_owner(root, path, status, owners)
        if not stat.S_ISLNK(status.st_mode):
            resolved = path
            if not status.st_mode & stat.S_ISVTX:  # in a sticky directory, as /tmp, only owners rename
                _check_mode(root, path, status)
    return resolved


def check_claimable(root: Path) -> None:
    """Raises what `claim_root` would raise, without writing anything. The root need not exist yet."""
    there = root
    while not is_there(there):
        there = there.parent
    if there == root:
        if not _is_open_and_empty(root):
            check_root(root)
    else:
        _check_above(root, there)


def claim_root(root: Path) -> None:
    """As `check_root`. First makes an empty root of this user private if others can write it, as is usual for fresh
    mounts.
    """
    if _is_open_and_empty(root):
        with exclusive(root):  # another rank of this node may have made it private, and used it
            if _is_open_and_empty(root):
                _close_to_others(root)
    check_root(root)


def find_other_owner(root: Path) -> str | None:
    """The owner of a root, if that is another user; None if it is this user, or REPLICATED_CKPT_TRUST_ROOT is set."""
    uid = root.stat().st_uid
    return None if uid in _owners_of_root(root) or _is_trusted() else _user(uid)


def make_private(root: Path, directory: Path, checked: os.stat_result | None = None) -> os.stat_result:
    """Makes the root and the agent's directory if they are missing, and checks them.

    Afterwards `check_root` holds, the directory and all files in it belong to this user, and none is a link. Pass the
    result as `checked` the next time: as long as it is the same directory, no other user can have changed it.
    """
    if checked is not None and _is_same(directory, checked):
        return checked
    if not is_there(root):
        make_root(root)
    claim_root(root)
    _share(root)
    directory.mkdir(exist_ok=True, mode=0o700)
    # After mkdir: another user may have put a directory or a link there first.
    status = found = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise _denial(root, directory, status, "it is not a directory", f"Remove {directory}; it is created again.")
    _check_owner(root, directory, status, {os.geteuid()})
    _check_mode(root, directory, status)
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # replaced meanwhile, or a file of a load that has just ended
                continue
            _check_file(root, Path(entry.path), status)
    return found


def is_of_another(directory: Path) -> bool:
    """Whether a directory exists that belongs to another user, or that this user cannot read.

    Raises:
        ConfigInvalid: its parent is a file.
    """
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    except NotADirectoryError as exc:
        raise ConfigInvalid(f"{directory.parent} is a file, not a node's store.", "Pass a directory as root.") from exc
    return (status.st_uid != os.geteuid() and not _is_trusted()) or not os.access(directory, os.R_OK | os.X_OK)


def _is_open_and_empty(root: Path) -> bool:
    status = root.stat()
    is_open = status.st_uid == os.geteuid() and bool(status.st_mode & _OTHERS_WRITE) and not _is_trusted()
    return is_open and not _has_content(root)


def _close_to_others(root: Path) -> None:
    status = root.stat()
    root.chmod(0o700)
    # Another user may have put a file there between the first look and chmod.
    if _has_content(root):
        raise _denial(
            root,
            root,
            status,
            "other users could write to it, and its content is not trusted",
            "Check its content, and remove it.",
        )


def _has_content(root: Path) -> bool:
    """Whether a directory has entries besides `lost+found`, which mkfs makes."""
    return any(path.name != "lost+found" for path in root.iterdir())


def _is_same(directory: Path, checked: os.stat_result) -> bool:
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    return all(getattr(found, name) == getattr(checked, name) for name in ("st_dev", "st_ino", "st_uid", "st_mode"))


def read_private(path: Path) -> bytes:
    """A small file of the agent's directory, if it is this user's, and no link.

    Raises:
        StoreDenied: it is another user's, or others can write it. OSError: it cannot be read.
    """
    try:
        # O_NONBLOCK: opening a pipe in the file's place would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _denial(path.parent, path, path.lstat(), "it is a symbolic link", f"Remove {path}.") from exc
        raise
    with os.fdopen(fd, "rb") as file:
        # Of the open file: its name may belong to another file by now.
        _check_file(path.parent, path, os.fstat(fd))
        return file.read()


def _share(root: Path) -> None:
    """Lets the group of REPLICATED_CKPT_GROUP, if set, read all later saves under the root.

    Raises:
        ConfigInvalid: there is no such group, or this user is not a member of it.
    """
    name = os.environ.get(GROUP_ENV)
    if not name:
        return
    gid = _gid(name)
    status = root.stat()
    if status.st_gid == gid and (stat.S_IMODE(status.st_mode) == SHARED_MODE or status.st_uid != os.geteuid()):
        return  # a volume with fsGroup is root's: only its group can be compared
    try:
        os.chown(root, -1, gid)
        root.chmod(SHARED_MODE)  # after chown: in a foreign group chmod drops the set-group-id bit
    except PermissionError as exc:
        hint = f"Name a group of this user (see `id`) in {GROUP_ENV} or --group."
        raise ConfigInvalid(f"{root} cannot be shared with the group {name!r}: {exc.strerror}.", hint) from exc


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each directory and link on the way to `path`, and `path` itself. Links are followed one by one, not by the kernel."""
    at, left, links = Path("/"), list(reversed(path.parts[1:])), 0
    yield at, at.lstat()
    while left:
        part = left.pop()
        if part == "..":
            at = at.parent
            continue
        step = at / part
        status = step.lstat()
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            at = step
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = step.readlink()  # each step of its target is checked, too: it can be replaced
        at = Path("/") if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _check_file(root: Path, path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISSOCK(status.st_mode):
        raise _denial(root, path, status, "it is not a plain file", f"Remove {path}; it is created again.")
    _check_owner(root, path, status, {os.geteuid()})
    if stat.S_ISREG(status.st_mode):
        _check_mode(root, path, status)


def _check_owner(root: Path, path: Path, status: os.stat_result, owners: set[int]) -> None:
    if status.st_uid not in owners and not _is_trusted():
        why = f"it should belong to {' or '.join(_user(uid) for uid in sorted(owners))}"
        hint = (
            f"Another user controls its content. Use your own root. If {path} is yours, check its content, then "
            f"`chown` it. {TRUST_ROOT_ENV}=1 trusts all users of this host."
        )
        raise _denial(root, path, status, why, hint)


def _check_mode(root: Path, path: Path, status: os.stat_result) -> None:
    open_to = status.st_mode & _OTHERS_WRITE
    if open_to & stat.S_IWGRP and _is_group_trusted(status):
        open_to &= ~stat.S_IWGRP
    if open_to and not _is_trusted():
        raise _denial(root, path, status, "other users can write it", _advise_on_mode(path, status, open_to))


def _advise_on_mode(path: Path, status: os.stat_result, open_to: int) -> str:
    """The hint, chosen by what this user can change. The user may not be the owner: kubelet's volumes belong to root."""
    if os.geteuid() in (0, status.st_uid):
        inside = "in it" if status.st_mode & stat.S_ISVTX else "elsewhere"
        step = f"Check its content, then `chmod go-w {path}`; or use a root {inside}. {TRUST_ROOT_ENV}=1 trusts all"
        return f"{step} users of this host."
    if not open_to & stat.S_IWOTH:
        gid = status.st_gid
        return (
            f"If all members of group {gid} may write to {path}, set {GROUP_ENV}={gid}; otherwise use a root elsewhere."
        )
    if status.st_mode & stat.S_ISVTX:
        return f"Use a directory in {path} as the root; it is created."
    return (
        f"If no other user can reach {path}, as with a pod's emptyDir, set {TRUST_ROOT_ENV}=1; otherwise use a "
        "root elsewhere."
    )


def _is_group_trusted(status: os.stat_result) -> bool:
    """Whether the group is the owner's private group (same number), or the group of REPLICATED_CKPT_GROUP.

    For a directory of root, such as a volume with fsGroup, the private group of this user counts. Group 0 is never
    trusted: containers run processes of any user in it.
    """
    name = os.environ.get(GROUP_ENV)
    return (0 != status.st_gid == (status.st_uid or os.geteuid())) or bool(name and status.st_gid == _gid(name))


def _denial(root: Path, path: Path, status: os.stat_result, why: str, hint: str) -> StoreDenied:
    found = f"{why}; its owner is {_user(status.st_uid)} and its mode {stat.S_IMODE(status.st_mode):04o}"
    return StoreDenied(str(root), "trust", str(path), found, hint)


def _is_trusted() -> bool:
    return is_switched_on(TRUST_ROOT_ENV)


def _owners_of_root(root: Path) -> set[int]:
    """Users who may own a root: this user, and the user root if this user can write to it."""
    return {os.geteuid(), 0} if os.access(root, os.W_OK) else {os.geteuid()}


def _owners_above() -> set[int]:
    """Users who may own the directories above: this user and root, which a user namespace without root shows as nobody."""
    owners = {0, os.geteuid()}
    ranges = [tuple(map(int, line.split())) for line in _UID_MAP.read_text().splitlines()] if is_there(_UID_MAP) else []
    if ranges and not any(first <= 0 < first + count for first, _, count in ranges):
        owners.add(int(_OVERFLOW_UID.read_text()))
    return owners


def _gid(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError as exc:
        raise ConfigInvalid(
            f"{GROUP_ENV} (or --group) names {name!r}, but this host has no such group.",
            "Name a group of this host (`getent group` lists them) or its number.",
        ) from exc


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"
