"""Finds the store that `--root` names, and starts its agent if the user asks for it."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.core.layout import (
    AGENT_DIR,
    MANIFEST_NAME,
    METADATA_NAME,
    NODE_NAME,
    STAGING_DIR,
    ShardName,
)
from replicated_ckpt.environment import ROOT_ENV, RSH_ENV, TRUST_ROOT_ENV, default_root
from replicated_ckpt.errors import (
    AgentUnavailable,
    CheckpointNotFound,
    ConfigInvalid,
    ReplicatedCkptError,
    StoreDenied,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.address_book import INTRODUCE_HINT, PeerBook, listening_host
from replicated_ckpt.node.peers.watch import runs_no_agent
from replicated_ckpt.stores.files.durable import store_error_of, translate_errors
from replicated_ckpt.stores.files.existence import is_directory, is_plain_file
from replicated_ckpt.stores.files.ownership import find_other_owner
from replicated_ckpt.stores.local.directories.roots import (
    describe_store_above,
    describe_stores_within,
    find_store_above,
    find_stores_within,
)
from replicated_ckpt.stores.local.memory_tier import find_memory_tier
from replicated_ckpt.stores.local.store import EmptyStore, LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import one_line, plural

_OF_A_STORE = {NODE_NAME, AGENT_DIR, STAGING_DIR}
_NAME_IT = "Pass --root with the directory that the ranks of this node save to, the `root` of ReplicatedWriter."
_SHOWN_MAX = 3


def open_store(root: str, *, of_any_user: bool = False) -> LocalStore:
    """The store under `root`. Creates and changes nothing. `of_any_user`: it may belong to another user, and is only read.

    Raises:
        CheckpointNotFound: there is no store. ConfigInvalid: `root` is a checkpoint, lies in a store, or has stores in it.
            StoreDenied: the store is another user's. StoreError: it cannot be read.
    """
    if not root:
        raise ConfigInvalid("--root must name a directory, not ''.", _NAME_IT)
    store = LocalStore(root)
    check_is_no_file(store.root)
    try:
        # A root that is a disk's mount point has a lost+found, which only root can read.
        names = sorted(entry.name for entry in os.scandir(store.root) if entry.name != "lost+found")
        owner = None if of_any_user else find_other_owner(store.root)
        if owner is None and not of_any_user:
            _check_is_open(store.root, names)
    except (FileNotFoundError, NotADirectoryError) as exc:  # or a directory above it is a file
        raise CheckpointNotFound(f"Directory {store.root} does not exist.", _new_disk_hint(store.root)) from exc
    except PermissionError as exc:
        raise _refuse_unreadable(store.root, exc) from exc
    except OSError as exc:
        raise store_error_of(exc, str(store.root), "look at", str(store.root)) from exc
    if owner is not None:
        raise _refuse(
            store.root, f"it is the store of {owner}", owner, f" {TRUST_ROOT_ENV}=1 trusts all users of this host."
        )
    if not _OF_A_STORE.intersection(names):
        with translate_errors(str(store.root), "look for", NODE_NAME):
            _check_content(store, names)
    return store


def _new_disk_hint(root: Path) -> str:
    return (
        f"{_NAME_IT} If this is the right directory, its disk is not mounted, or is new: the first save or load of a rank "
        "here creates the store. If this node's former disk is lost, another node makes its copies anew: "
        f"`replicated-ckpt repair --root {quote(str(root))} --lost NODE`."
    )


def _check_is_open(root: Path, names: list[str]) -> None:
    """Raises StoreDenied: the owner, another user, has closed a directory of the root. Checkpoints may be in it."""
    owner = root.stat().st_uid
    # No other user can have closed the user's own directories.
    if owner == os.geteuid():
        return
    for name in names:
        place = root / name
        if name.startswith(".") or os.access(place, os.R_OK | os.X_OK):
            continue
        if is_directory(place) and place.stat().st_uid == owner:
            raise _refuse(root, f"this user may not read {name!r} in it", None)


def check_is_no_file(root: str | Path) -> None:
    """Raises CheckpointNotFound: the root is a file. StoreError: the disk cannot be read."""
    with translate_errors(str(root), "look at", str(root)):
        if is_plain_file(root):
            raise CheckpointNotFound(f"{root} is a file, not a node's store.", _NAME_IT)


def _account(owner: str) -> str:
    """The owner as an argument of `sudo -u`: a name, or a number such as `#1000`."""
    name = owner.split()[1]
    return f"'#{name}'" if name.isdecimal() else name


def _refuse_unreadable(root: Path, error: PermissionError) -> StoreDenied:
    try:
        owner = find_other_owner(root)
    except PermissionError:  # the directory above cannot be read, either
        owner = None
    whose = f", it is the store of {owner}" if owner else ""
    return _refuse(root, f"this user may not read it ({error.strerror}){whose}", owner)


def _refuse(root: Path, why: str, owner: str | None, otherwise: str = "") -> StoreDenied:
    user = _account(owner) if owner else "USER"
    hint = (
        f"Run the command as that user: `sudo -u {user} replicated-ckpt ...`. Only the owner of a store reaches "
        f"its agent.{otherwise}"
    )
    return StoreDenied(str(root), "look at", str(root), f"{why}. Nothing was checked", hint)


def _check_content(store: LocalStore, names: list[str]) -> None:
    """Checks a directory that has no file of a store. Checkpoints of stock torch, which need none, may lie in it.

    Raises:
        ConfigInvalid: it is one checkpoint, lies in a store, or has stores in it. CheckpointNotFound: it has no checkpoint.
    """
    if {MANIFEST_NAME, METADATA_NAME}.intersection(names) or any(ShardName.parse(name) for name in names):
        # The root may be a link to the checkpoint: the store lies above the real path.
        real = Path(os.path.realpath(store.root))
        above = find_store_above(real) or real.parent
        checkpoint_id = real.relative_to(above)
        hint = f"Name the store: --root {above}. In it, this is the checkpoint {str(checkpoint_id)!r}."
        raise ConfigInvalid(f"{store.root} is one checkpoint, not a node's store.", hint)
    if not names:
        raise CheckpointNotFound(f"{store.root} is empty: it holds no store yet.", _new_disk_hint(store.root))
    outer = find_store_above(store.root)
    if outer is not None:
        raise ConfigInvalid(describe_store_above(store.root, outer), f"Name that store: --root {quote(str(outer))}.")
    _check_no_stores_within(store)
    if next(store.catalog.directories(), None) is None and next(store.catalog.without_manifest(), None) is None:
        shown = ", ".join(names[:_SHOWN_MAX]) + (", ..." if len(names) > _SHOWN_MAX else "")
        raise CheckpointNotFound(
            f"{store.root} is not a node's store: it has no {NODE_NAME} and no checkpoint. It has {shown}.",
            _NAME_IT,
        )


def _check_no_stores_within(store: LocalStore) -> None:
    """Refuses a directory above several stores, whose checkpoints would look like one node's."""
    within = find_stores_within(store.root)
    if not within:
        return
    hint = f"Name one store: {' or '.join(f'--root {quote(str(place))}' for place in within[:_SHOWN_MAX])}."
    others = sorted({*store.catalog.directories(), *store.catalog.without_manifest()})
    if others:
        hint += (
            f" To list {', '.join(others[:_SHOWN_MAX])}, which lie in no store, move them to a directory of their own."
        )
    raise ConfigInvalid(describe_stores_within(store.root, within), hint)


def describe_memory_tier(store: LocalStore) -> list[str]:
    """Lines for this node's memory tier, or none if no job has used one. Other nodes' tiers are not asked."""
    try:
        root = find_memory_tier(store)
        if root is None:
            return []
        tier = LocalStore(root)
        held = tier.catalog.holdings(tier.read_node_id())
    except ReplicatedCkptError as exc:
        return [f"memory tier: it cannot be read: {exc.message}"]
    if not held:
        return [f"memory tier at {root}: empty on this node"]
    newest = max(held, key=lambda each: (each.created_unix_s, each.sequence))
    count = plural(len(held), "checkpoint")
    found = f"{count} on this node, the newest {newest.checkpoint_id}"
    return [f"memory tier at {root}: {found}; `replicated-ckpt ls --root {quote(str(root))}` asks all nodes"]


_GREETING_WAIT_S = 20.0
_POLL_S = 0.05
_RSH_S = 60.0


_ROOT = "this node's store, the root that the job saves to"


def add_root_argument(parser: argparse.ArgumentParser, what: str = _ROOT, *, required: bool = True) -> None:
    """Adds `--root`. `required`: the verb needs a store, which `--root` or the environment names."""
    root = default_root()
    parser.add_argument(
        "--root", required=required and root is None, default=root, help=f"{what} (default: {ROOT_ENV})"
    )


def repeat_command(arguments: argparse.Namespace, store: LocalStore) -> str:
    """This command with an absolute root, for a shell on another node, where a relative path would mean another place."""
    words = ["replicated-ckpt", *arguments.given]
    root = str(store.root)
    return shlex.join(words if {root, f"--root={root}"} & set(words) else [*words, "--root", root])


def add_start_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-agents",
        action="store_true",
        help="start this node's agent if none runs; with --rsh, also the agents of the other nodes",
    )
    parser.add_argument(
        "--rsh",
        default=os.environ.get(RSH_ENV, ""),
        metavar="COMMAND",
        help=f"command that reaches the other nodes' hosts, such as ssh (default: {RSH_ENV})",
    )


def open_store_of(arguments: argparse.Namespace) -> LocalStore:
    """The store under `--root`. With `--start-agents` its agent runs afterwards. With `--nodes` alone, an EmptyStore.

    Raises:
        CheckpointNotFound, ConfigInvalid, StoreDenied, StoreError: as `open_store`. AgentUnavailable: no agent can start.
    """
    if arguments.root is None:
        if not arguments.nodes or arguments.start_agents or getattr(arguments, "own_agent", False):
            raise refuse_no_store()
        return EmptyStore()
    store = open_store(arguments.root)
    if arguments.start_agents:
        start_agent(store)
        # `start_other_agents` passes `--own-agent`, so that no other node starts further agents in turn.
        if arguments.rsh and not getattr(arguments, "own_agent", False):
            for problem in start_other_agents(store, shlex.split(arguments.rsh)):
                print(problem, file=sys.stderr)
    return store


def refuse_no_store(*, otherwise: str = "") -> ConfigInvalid:
    """The error of a command that names no store. `otherwise`: what else it may name."""
    hint = f"Name a node's store with --root or {ROOT_ENV}, or agents with --nodes{otherwise}."
    return ConfigInvalid("No store was named.", hint)


def name_root(store: LocalStore) -> Path:
    """The root as next steps name it."""
    return Path("ROOT") if isinstance(store, EmptyStore) else store.root


def start_other_agents(store: LocalStore, rsh: Sequence[str]) -> list[str]:
    """Starts an agent on each node of the address book where none runs. Returns an error for each that did not start.

    `rsh`: the command that is followed by a host and a command, such as ssh. The store must have the same path there.
    """
    command = f"replicated-ckpt status --own-agent --start-agents --root {quote(str(store.root))}"
    peers = PeerBook(store.root_agent_directory())

    def start(address: AgentAddress) -> None:
        try:
            with AgentClient(address) as client:
                client.call("GET", "/v1/status?brief=1")
        except StoreUnavailable as exc:
            # Only a refused connection shows that no agent runs there.
            if runs_no_agent(exc):
                _run_there(address, [*rsh, address.host, command])
                _check_address(peers.address_of(address.node_id))

    outcome = FanOut.run(peers.read_all(), start)
    return [str(error) for error in outcome.errors.values() if isinstance(error, AgentUnavailable)]


def _run_there(address: AgentAddress, words: Sequence[str]) -> None:
    """Runs a command that starts the agent of another node. Raises AgentUnavailable: the command failed."""
    # Another process wrote the host: one that begins with "-" would be an option of ssh.
    if address.host.startswith("-") or not address.host:
        raise AgentUnavailable(f"No agent was started for {address.label}: its address is not a host.")
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RSH_S, check=False
        )
        why = f"it ended with {done.returncode}: {one_line(done.stderr.strip())}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as exc:
        why = one_line(exc)
    if why:
        hint = "Run it by hand, and see what it needs. The other nodes were not affected."
        raise AgentUnavailable(f"`{shlex.join(words)}` started no agent: {why}", hint)


def _check_address(address: AgentAddress) -> None:
    """Raises AgentUnavailable: the agent that was started there does not serve this address.

    It announces its address only to nodes in its own address book, which may have been lost.
    """
    try:
        with AgentClient(address) as client:
            client.call("GET", "/v1/status?brief=1")
    except StoreUnavailable as exc:
        raise AgentUnavailable(
            f"An agent runs on {address.host}, but not at {address.host}:{address.port}, the address that this node has.",
            INTRODUCE_HINT,
        ) from exc


def start_agent(store: LocalStore) -> AgentAddress:
    """This node's agent, started if none runs, after it has announced its address to the peers that answer."""
    own = ensure_agent(store, listening_host(store.root_agent_directory())).local_address()
    deadline = time.monotonic() + _GREETING_WAIT_S
    with AgentClient(own) as client:
        # Peers fetch copies from this agent, so they need its new address before a plan names it.
        while not client.call("GET", "/v1/status").get("greeted") and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return own
