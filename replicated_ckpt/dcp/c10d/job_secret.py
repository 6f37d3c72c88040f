"""The job's secret: what ranks post on the c10d store is believed only from processes that have it, if one is given."""

import hashlib
import hmac
import os
import stat
from pathlib import Path

from replicated_ckpt.environment import JOB_SECRET_ENV, JOB_SECRET_FILE_ENV
from replicated_ckpt.errors import ConfigInvalid, JobSecretMismatch, ReplicatedCkptError

SECRET_CHARS_MIN = 16
_TAG = b"hmac-sha256:"
_MAC_BYTES = 64
_HINT = "Draw one for each job with `openssl rand -hex 32`, say, and give it to every rank, and to nothing else."


class Seal:
    """Marks and checks what is written under one name of the c10d store. Without a secret nothing is marked.

    `scope` tells apart process groups. With a `problem` nothing is marked and nothing is believed: a rank that reads what
    this rank wrote, and this rank when it reads, learns of it at once.
    """

    def __init__(
        self, secret: bytes | None = None, scope: str = "", problem: ReplicatedCkptError | None = None
    ) -> None:
        self._secret = secret
        self._scope = scope.encode()
        self._problem = problem

    @classmethod
    def of_job(cls, scope: str) -> "Seal":
        """With the secret that this process was given, if any. What is wrong with it is said when it is first needed."""
        try:
            return cls(_job_secret(), scope)
        except ConfigInvalid as exc:
            return cls(None, scope, exc)

    def mark(self, key: str, raw: bytes) -> bytes:
        """What goes before `raw`, or elsewhere, and shows that a process of the job wrote it under `key`; may be empty."""
        if self._secret is None:
            return b""
        message = b"\0".join((self._scope, key.encode(), raw))
        return _TAG + hmac.digest(self._secret, message, hashlib.sha256).hex().encode()

    def check(self, key: str, raw: bytes, mark: bytes) -> None:
        """Raises JobSecretMismatch: `mark` is not that of `raw` under `key`."""
        if self._problem is not None:
            raise self._problem
        if not hmac.compare_digest(mark, self.mark(key, raw)):
            raise JobSecretMismatch(f"What was posted as {key!r} on the c10d store {self._why(mark)}.")

    def _why(self, mark: bytes) -> str:
        if self._secret is None:
            return "carries a mark of a job secret, and this rank was given none"
        return "carries the mark of another job secret, or was changed" if mark else "carries no mark of the job secret"


def split(sealed: bytes) -> tuple[bytes, bytes]:
    """Mark and content of what was written with the mark before it."""
    end = len(_TAG) + _MAC_BYTES if sealed.startswith(_TAG) else 0
    return sealed[:end], sealed[end:]


def _job_secret() -> bytes | None:
    """The secret from the environment, or from the file that it names; None without one.

    Raises:
        ConfigInvalid: it is too short, others can read the file, or it cannot be read.
    """
    given, path = os.environ.get(JOB_SECRET_ENV), os.environ.get(JOB_SECRET_FILE_ENV)
    if given and path:
        raise ConfigInvalid(f"Both {JOB_SECRET_ENV} and {JOB_SECRET_FILE_ENV} are set.", "Set one of them.")
    secret = _secret_in(Path(path)) if path else (given or "").encode()
    if not secret and not path:
        return None
    if len(secret.strip()) < SECRET_CHARS_MIN:
        where = JOB_SECRET_FILE_ENV if path else JOB_SECRET_ENV
        raise ConfigInvalid(f"The job secret of {where} has fewer than {SECRET_CHARS_MIN} characters.", _HINT)
    return secret.strip()


def _secret_in(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read()
    except OSError as exc:
        raise ConfigInvalid(
            f"The job secret in {path} ({JOB_SECRET_FILE_ENV}) cannot be read: {exc.strerror}.",
            f"Put the secret there on every node, readable by this user alone: `chmod 600 {path}`.",
        ) from exc
    mode = stat.S_IMODE(status.st_mode)
    readers = stat.S_IRGRP if status.st_uid == 0 else 0  # root lets a group read what it mounts into a container
    if status.st_uid not in (0, os.geteuid()) or mode & 0o077 & ~readers:
        found = f"it is of user {status.st_uid} and has mode {mode:04o}"
        raise ConfigInvalid(f"The job secret in {path} is not this user's alone: {found}.", f"chmod 600 {path}")
    return secret
