"""Whose a store is: its root, and what agents keep in it, count only where no other user of the host can have put it."""

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
_LINKS_MAX = 40
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
_UID_MAP = Path("/proc/self/uid_map")


def check_root(root: Path) -> None:
    """The root is this user's, and no other user can have put another directory, or a link, in its place.

    A user who can write a directory can rename what lies in it, unless it is sticky, as /tmp is. The root may be the host's
    root's, where this user can write it: kubelet makes volumes with fsGroup so.

    Raises:
        StoreDenied: it is not, naming the path, its owner and its mode. OSError
    """
    resolved = _check_above(root, root)
    status = resolved.stat()
    _check_owner(root, resolved, status, _owners_of_root(resolved))
    _check_mode(root, resolved, status)


def _check_above(root: Path, there: Path) -> Path:
    """Each step on the way to a directory; returns what it is without links."""
    resolved, owners = Path("/"), _owners_above()
    for path, status in _steps(there):
        _check_owner(root, path, status, owners)
        if not stat.S_ISLNK(status.st_mode):
            resolved = path
            if not status.st_mode & stat.S_ISVTX:
                _check_mode(root, path, status)
    return resolved


def check_claimable(root: Path) -> None:
    """Raises what `claim_root` will, before anything is written, and also where the root is still to be made."""
    there = root
    while not is_there(there):
        there = there.parent
    if there == root:
        if not _is_open_and_empty(root):
            check_root(root)
    else:
        _check_above(root, there)


def claim_root(root: Path) -> None:
    """As `check_root`. An empty root of this user that others can write, as a mount often is, is made private first.

    Raises:
        StoreDenied: as that does, or another user was faster and has put something there. StoreUnavailable, OSError
    """
    if _is_open_and_empty(root):
        with exclusive(root):  # another rank of this node may have closed it meanwhile, and have put something there
            if _is_open_and_empty(root):
                _close(root)
    check_root(root)


def find_other_owner(root: Path) -> str | None:
    """The user whose store it is, where that is not this process's; None where it is, or all users are believed."""
    uid = root.stat().st_uid
    return None if uid in _owners_of_root(root) or _is_trusted() else _user(uid)


def make_private(root: Path, directory: Path, checked: os.stat_result | None = None) -> os.stat_result:
    """Makes the agent's directory, and the root, where they are missing; what is there is checked first.

    Afterwards `check_root` holds, and the directory, and all that lies in it, is this user's and no link. What is
    returned is passed as `checked` the next time: while it is the same directory, no other user can have changed it.

    Raises:
        StoreDenied: another user can have put something there. ConfigInvalid: as of the group. OSError
    """
    if checked is not None and _is_same(directory, checked):
        return checked
    if not is_there(root):
        make_root(root)
    claim_root(root)
    _share(root)
    directory.mkdir(exist_ok=True, mode=0o700)
    status = found = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise _denial(root, directory, status, "it is no directory", f"Remove {directory}; it is made again.")
    _check_owner(root, directory, status, {os.geteuid()})
    _check_mode(root, directory, status)
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # a file that is being replaced, or of a load that has just ended
                continue
            _check_file(root, Path(entry.path), status)
    return found


def is_of_another(directory: Path) -> bool:
    """Whether a directory is there that is another user's, or that this user cannot read.

    Raises:
        ConfigInvalid: what should hold it is a file.
    """
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    except NotADirectoryError as exc:
        raise ConfigInvalid(f"{directory.parent} is a file, and no node's store.", "Pass a directory as root.") from exc
    return (status.st_uid != os.geteuid() and not _is_trusted()) or not os.access(directory, os.R_OK | os.X_OK)


def _is_open_and_empty(root: Path) -> bool:
    status = root.stat()
    is_open = status.st_uid == os.geteuid() and bool(status.st_mode & _OTHERS_WRITE) and not _is_trusted()
    return is_open and not _has_content(root)


def _close(root: Path) -> None:
    status = root.stat()
    root.chmod(0o700)
    if _has_content(root):
        raise _denial(
            root, root, status, "other users could write it, and have", "Look at what lies in it, and remove it."
        )


def _has_content(root: Path) -> bool:
    """Whether anything lies there but what a file system makes for itself."""
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
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise _denial(path.parent, path, path.lstat(), "it is a symbolic link", f"Remove {path}.") from exc
        raise
    with os.fdopen(fd, "rb") as file:
        _check_file(path.parent, path, os.fstat(fd))
        return file.read()


def _share(root: Path) -> None:
    """Lets the group that REPLICATED_CKPT_GROUP names, if any, read what is saved under the root from now on.

    Raises:
        ConfigInvalid: there is no such group, or this user is no member of it.
    """
    name = os.environ.get(GROUP_ENV)
    if not name:
        return
    gid = _gid(name)
    status = root.stat()
    if status.st_gid == gid and (stat.S_IMODE(status.st_mode) == SHARED_MODE or status.st_uid != os.geteuid()):
        return  # also where it is root's, as a volume with fsGroup is
    try:
        os.chown(root, -1, gid)
        root.chmod(SHARED_MODE)
    except PermissionError as exc:
        hint = f"Name a group of this user (see `id`) in {GROUP_ENV} or --group."
        raise ConfigInvalid(f"{root} cannot be shared with the group {name!r}: {exc.strerror}.", hint) from exc


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each directory and each link on the way to `path`, and `path` itself, links followed one by one."""
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
        target = step.readlink()
        at = Path("/") if target.is_absolute() else at
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _check_file(root: Path, path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISSOCK(status.st_mode):
        raise _denial(root, path, status, "it is no plain file", f"Remove {path}; it is made again.")
    _check_owner(root, path, status, {os.geteuid()})
    if stat.S_ISREG(status.st_mode):
        _check_mode(root, path, status)


def _check_owner(root: Path, path: Path, status: os.stat_result, owners: set[int]) -> None:
    if status.st_uid not in owners and not _is_trusted():
        why = f"expected it to be of {' or '.join(_user(uid) for uid in sorted(owners))}"
        hint = (
            f"Another user chooses what lies there. Use a root of your own; if {path} is yours, look at what lies in it, "
            f"then `chown` it. {TRUST_ROOT_ENV}=1 believes all users of this host."
        )
        raise _denial(root, path, status, why, hint)


def _check_mode(root: Path, path: Path, status: os.stat_result) -> None:
    open_to = status.st_mode & _OTHERS_WRITE
    if open_to & stat.S_IWGRP and _is_group_trusted(status):
        open_to &= ~stat.S_IWGRP
    if open_to and not _is_trusted():
        raise _denial(root, path, status, "other users can write it", _advise_on_mode(path, status, open_to))


def _advise_on_mode(path: Path, status: os.stat_result, open_to: int) -> str:
    """What this user can do, who may not be the owner: kubelet's volumes are root's."""
    if os.geteuid() in (0, status.st_uid):
        inside = "in it" if status.st_mode & stat.S_ISVTX else "elsewhere"
        step = f"Look at what lies in it, then `chmod go-w {path}`; or use a root {inside}. {TRUST_ROOT_ENV}=1 believes all"
        return f"{step} users of this host."
    if not open_to & stat.S_IWOTH:
        gid = status.st_gid
        return f"If all members of group {gid} may write in {path}, set {GROUP_ENV}={gid}; else use a root elsewhere."
    if status.st_mode & stat.S_ISVTX:
        return f"Use a directory in {path} as the root; it is made."
    return (
        f"If no other user can reach {path}, as this pod's emptyDir, set {TRUST_ROOT_ENV}=1; else use a root elsewhere."
    )


def _is_group_trusted(status: os.stat_result) -> bool:
    """Whether it is the owner's own group, as systems make it that let groups write by default, or the one that is named.

    Of a directory of root's, as a volume with fsGroup is, it is this user's own. Group 0 belongs to no user: containers run
    processes of any user in it.
    """
    name = os.environ.get(GROUP_ENV)
    return (0 != status.st_gid == (status.st_uid or os.geteuid())) or bool(name and status.st_gid == _gid(name))


def _denial(root: Path, path: Path, status: os.stat_result, why: str, hint: str) -> StoreDenied:
    found = f"{why}; it is of {_user(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):04o}"
    return StoreDenied(str(root), "believe", str(path), found, hint)


def _is_trusted() -> bool:
    return is_switched_on(TRUST_ROOT_ENV)


def _owners_of_root(root: Path) -> set[int]:
    """Who may own a root: this user, and the host's root where this user can write there."""
    return {os.geteuid(), 0} if os.access(root, os.W_OK) else {os.geteuid()}


def _owners_above() -> set[int]:
    """Who may own the directories above: this user and root, who is seen as nobody where a container does not map it."""
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
            f"{GROUP_ENV} (or --group) names {name!r}, and this host has no such group.",
            "Name a group of this host (`getent group` lists them) or its number.",
        ) from exc


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"
