"""The object store of a drill: a new prefix under a URL, or an embedded moto server."""

import importlib.util
import math
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from replicated_ckpt.drill import processes
from replicated_ckpt.drill.cluster import PACKAGE_PARENT
from replicated_ckpt.drill.plan import MOTO, MotoFailed
from replicated_ckpt.errors import ConfigInvalid, StoreError
from replicated_ckpt.stores.bucket_client.client import ObjectClient
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget

MOTO_START_LIMIT_S = 30.0
MOTO_END_LIMIT_S = 5.0
MOTO_PACKAGES = ("moto", "flask", "flask_cors")  # what moto[server] brings
BUCKET = "drill"
_NOTE_KEY = "what-is-this.txt"
_NOTE = b"A drill of replicated_ckpt writes below this prefix, and removes it at the end.\n"
_HINT = "Check the URL of --object-store and the credentials in the environment. Nothing was started yet."

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A bucket as writers and readers get it. `about` is its name in the output, without secrets."""

    url: str
    storage_options: Mapping[str, Any] | None
    about: str


def has_moto() -> bool:
    """Whether an embedded server can be started here. Imports nothing."""
    return all(importlib.util.find_spec(name) is not None for name in MOTO_PACKAGES)


@contextmanager
def object_store(named: str | None, workdir: Path, *, keep: bool, progress: Progress) -> Iterator[ObjectStore | None]:
    """The object store of a plan during a with block; None if the plan has none.

    moto is stopped at the end of the with block, or when this process ends, even if it is killed. Under a URL the drill
    writes to a new prefix, and removes that prefix afterwards unless `keep`. The credentials come from the environment.

    Raises:
        MotoFailed: moto does not start. ConfigInvalid: the URL is not supported. StoreError: a write to the store failed.
    """
    if named is None:
        yield None
    elif named == MOTO:
        with _moto(workdir) as url:
            progress(f"object store: moto at {url}")
            yield ObjectStore(f"s3://{BUCKET}", _way_to(url), f"moto {version('moto')}")
    else:
        with _own_prefix(named, keep=keep, progress=progress) as url:
            yield ObjectStore(url, None, named)


def _way_to(endpoint_url: str) -> dict[str, Any]:
    """Sets all options of s3fs for moto, so that s3fs takes none from the environment, such as a proxy."""
    return {
        "key": "drill",
        "secret": "drill-secret",
        "client_kwargs": {"endpoint_url": endpoint_url, "region_name": "us-east-1"},
        "config_kwargs": {"proxies": {}},
    }


@contextmanager
def _moto(workdir: Path) -> Iterator[str]:
    log = workdir / "logs" / "moto.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", "replicated_ckpt.drill.moto_server", BUCKET),
            stdin=subprocess.PIPE,  # the kernel closes it if this process is killed; then the server ends
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            # Not the mark of the nodes: the server outlives them.
            env=os.environ | {"PYTHONPATH": path, processes.MARK_VARIABLE: f"moto:{workdir}"},
            start_new_session=True,
        )
    with process:
        try:
            assert process.stdout is not None
            # readline() alone would wait forever for a server that hangs.
            is_heard, _, _ = select.select([process.stdout], [], [], MOTO_START_LIMIT_S)
            url = process.stdout.readline().strip() if is_heard else ""
            if not url:
                raise MotoFailed(f"moto did not start. {log.read_text(errors='replace').strip()[-2000:]}")
            yield url
        finally:
            process.kill()
            process.wait(MOTO_END_LIMIT_S)


@contextmanager
def _own_prefix(url: str, *, keep: bool, progress: Progress) -> Iterator[str]:
    """A new prefix below `url`, after a test write."""
    ObjectTarget.check_supported(url, None)  # so that an error has the user's URL
    # Its own prefix: the drill may remove everything below it.
    own = f"{url.rstrip('/')}/drill-{uuid.uuid4().hex[:12]}"
    target = ObjectTarget.check_supported(own, None)
    # Ranks are separate processes: each would have its own empty bucket.
    if target.is_process_local:
        raise ConfigInvalid(f"--object-store {url}: each process would have its own bucket.")
    with closing(open_client(target)) as client:
        try:
            # Fails before the training run if the bucket cannot be written.
            client.put(_NOTE_KEY, _NOTE)
        except StoreError as exc:
            raise type(exc)(exc.store, exc.op, exc.key, exc.detail, _HINT) from exc
        progress(f"object store: {own}")
        try:
            yield own
        finally:
            if keep:
                progress(f"kept: {own}")
            else:
                _remove_all(client, own, progress)


def _remove_all(client: ObjectClient, own: str, progress: Progress) -> None:
    """Removes all objects of the drill, and the unfinished uploads of killed nodes. Reports a failure as progress."""
    try:
        client.delete(list(_keys(client, "")))
        client.end_unfinished("", -math.inf)  # all of them, whatever the clocks show
    except StoreError as exc:
        progress(f"left behind: {own}: {exc}")


def _keys(client: ObjectClient, directory: str) -> Iterator[str]:
    listing = client.list_keys(directory)
    yield from (f"{directory}{name}" for name in listing.sizes)
    for name in listing.directories:
        yield from _keys(client, f"{directory}{name}/")
