"""One exception tree. Every error says what happened, to what, and in `hint` what the operator does next."""

import builtins
from collections.abc import Mapping, Sequence

from replicated_ckpt.searched import next_step
from replicated_ckpt.wording import escape_controls, list_some, plural

_CHOICES_MAX = 8
HINT_MARK = " Hint: "
"""Between an error's message and its hint, where both are one text."""


class ReplicatedCkptWarning(UserWarning):
    """Something is weaker than asked for, and nothing is lost: fewer copies than wanted, a bad copy that was replaced.

    Or a save replaces a checkpoint of a run that this process neither loaded nor saved.
    """


class ReplicatedCkptError(Exception):
    """Root of all errors of this package.

    `hint` is the operator's next step. Message and hint are one line each, whatever names from elsewhere they quote. The
    errors cross process boundaries (DCP gathers them by pickle), so every subclass keeps what it was made from in `args`.
    """

    default_hint = "See docs/runbook.md."

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = escape_controls(message)
        self.hint = escape_controls(hint or self.default_hint)

    def __str__(self) -> str:
        return f"{self.message}{HINT_MARK}{self.hint}"


class ConfigInvalid(ReplicatedCkptError):
    """An argument or a combination of arguments cannot work; nothing was written."""

    default_hint = "Correct the named argument; nothing was written."


class CheckpointIdMismatch(ReplicatedCkptError):
    """Ranks passed different checkpoint ids to one save or load; nothing was written or read."""

    default_hint = (
        "A timestamp that each rank takes differs. Derive the id from the step, or broadcast rank 0's: `ids = "
        "[checkpoint_id]; dist.broadcast_object_list(ids, src=0)`. Saves take it by ReplicatedWriter(checkpoint_id_from="
        '"coordinator").'
    )

    def __init__(self, id_by_rank: Mapping[int, str]) -> None:
        listed = ", ".join(f"rank {rank}: {checkpoint_id!r}" for rank, checkpoint_id in sorted(id_by_rank.items()))
        super().__init__(f"The ranks disagree about the checkpoint id ({listed}).")
        self.args = (dict(id_by_rank),)
        self.id_by_rank = dict(id_by_rank)


class CheckpointExists(ReplicatedCkptError):
    """A committed checkpoint of this id exists and the save has `overwrite=False`; it was left untouched."""

    default_hint = "Use another checkpoint id, or ReplicatedWriter(..., overwrite=True); the old one stays loadable."


class ManagerClosed(ReplicatedCkptError):
    """A CheckpointManager was used after `close`; nothing was done."""

    default_hint = "Use it inside its `with` block, or before close(); or make a new CheckpointManager."


class ManifestInvalid(ReplicatedCkptError):
    """A manifest does not parse, fails its checksum or contradicts itself; it is not believed."""

    default_hint = "Another node's copy is used if there is one; `replicated-ckpt repair --root ROOT` restores this."


class ManifestVersionUnknown(ManifestInvalid):
    """A manifest was written by a newer format than this version reads."""

    default_hint = "Upgrade replicated_ckpt to the version that wrote the checkpoint."


class CheckpointNotFound(ReplicatedCkptError):
    """No reachable store holds a committed checkpoint of this id (or any at all, for "latest").

    `unreached`: nodes of this very load, and the bucket, that did not answer and so may hold it.
    """

    default_hint = "Check the id with `replicated-ckpt ls --root ROOT`, and that the nodes that hold it take part."

    def __init__(self, message: str, hint: str | None = None, unreached: Sequence[str] = ()) -> None:
        absent = f"Bring back what may hold it, then load again: {'; '.join(unreached)}." if unreached else None
        super().__init__(message, hint or absent)
        self.args = (message, hint, tuple(unreached))
        self.unreached = tuple(unreached)


class CheckpointNotCommitted(CheckpointNotFound):
    """Only an unfinished save of this id exists; by promise 2 it does not count as a checkpoint."""

    default_hint = 'Load the one before it, or "latest"; the next save or load completes or removes this one.'


class CheckpointAmbiguous(ReplicatedCkptError):
    """Nodes hold different files of one name for a checkpoint without a manifest: two runs used its id. None was read."""

    default_hint = (
        "Find out which node's file belongs to the run that you want (time stamps help), and move the other run's "
        "directory away on the nodes named above."
    )

    def __init__(self, checkpoint_id: str, name: str, file_by_node: Mapping[str, str]) -> None:
        listed = "; ".join(f"node {node}: {file}" for node, file in sorted(file_by_node.items()))
        super().__init__(
            f"Checkpoint {checkpoint_id!r} has no manifest, and nodes hold different {name}: {listed}. "
            "Without one, nothing tells which of these files belong together."
        )
        self.args = (checkpoint_id, name, dict(file_by_node))
        self.checkpoint_id, self.name, self.file_by_node = checkpoint_id, name, dict(file_by_node)


class AckNotReached(ReplicatedCkptError):
    """Fewer copies than asked for, and `on_degraded="raise"`; or no holder has published some shard of a decided save."""

    default_hint = 'Bring the lost node back, or save with on_degraded="warn" to go on with fewer copies.'

    def __init__(self, wanted: int, have: Mapping[str, int], why: str = "", hint: str | None = None) -> None:
        listed = ", ".join(f"{shard}: {count}" for shard, count in sorted(have.items()))
        super().__init__(f"Wanted {wanted} copies of every shard, have {listed}. {why}".rstrip(), hint)
        self.args = (wanted, dict(have), why, hint)
        self.wanted = wanted
        self.have = dict(have)


class ShardLost(ReplicatedCkptError):
    """No intact copy of these shards was found anywhere; no tensor got a wrong byte. `is_latest`: that was asked for."""

    def __init__(
        self, checkpoint_id: str, owner_by_shard: Mapping[str, str], searched: Sequence[str], is_latest: bool = False
    ) -> None:
        shards = ", ".join(f"{shard} (owner {owner})" for shard, owner in sorted(owner_by_shard.items()))
        where = "; ".join(searched) or "nowhere: no store could be reached"
        super().__init__(
            f"Checkpoint {checkpoint_id!r}: no intact copy of {plural(len(owner_by_shard), 'shard')} is left: {shards}. "
            f"Searched: {where.rstrip('.')}.",
            next_step(searched, is_latest=is_latest),
        )
        self.args = (checkpoint_id, dict(owner_by_shard), tuple(searched), is_latest)
        self.checkpoint_id, self.searched = checkpoint_id, tuple(searched)
        self.shards, self.owner_by_shard = tuple(sorted(owner_by_shard)), dict(owner_by_shard)


class SaveAborted(ReplicatedCkptError):
    """This save was aborted or overtaken by another attempt; the previous checkpoint of this id still loads."""

    default_hint = "Look at the first failing rank's error; if none failed, look for a second job on this root."


class SaveSuperseded(SaveAborted):
    """A newer save, or one of another run, has the checkpoint's name on this node; it stays, and so does what is staged."""

    default_hint = "Load the checkpoint to get the newer save; what this one staged goes once that is seen whole."


class LineagesMet(ReplicatedCkptError):
    """Checkpoints of several runs lie in one directory of ids, and the load was not told which run it means."""

    default_hint = (
        'Pass ReplicatedReader(lineage="<one of those named above>"), or leave it out to take the one saved last; then '
        "give each run a directory of its own."
    )

    def __init__(self, checkpoint_id: str, lineages: Sequence[str], why: str) -> None:
        super().__init__(f"{checkpoint_id!r} is not loaded: {why}. Found: {'; '.join(lineages)}.")
        self.args = (checkpoint_id, tuple(lineages), why)
        self.checkpoint_id = checkpoint_id
        self.lineages = tuple(lineages)


class LatestAmbiguous(ConfigInvalid):
    """ "latest" is the newest checkpoint of one directory of ids, and there are several; nothing was read.

    `choices`: what to ask for instead, one for each directory, as "run-a/latest".
    """

    def __init__(self, choices: Sequence[str]) -> None:
        named = list_some([*map(repr, choices)], _CHOICES_MAX)
        super().__init__(
            f"'latest' is the newest checkpoint of one directory of ids, and checkpoints lie in {len(choices)} of them.",
            f"Name the directory of the run that you mean: {named}.",
        )
        self.args = (tuple(choices),)
        self.choices = tuple(choices)


class RendezvousFailed(ReplicatedCkptError):
    """Ranks of one save or load did not find each other over the c10d store in time."""

    default_hint = "Read those ranks' logs: all must call it. To load on one rank alone pass no_dist=True."


class RankFailed(ReplicatedCkptError):
    """A rank has ended, or failed with an error that is none of ours: the other ranks of the save or load raise this."""

    default_hint = "Look at the log of that rank: it has the error with its traceback."


class UploadFailed(ReplicatedCkptError):
    """A checkpoint is not in the object store, and waiting longer does not help or was not asked for. Its copies stand."""

    default_hint = "The copies on the nodes stand; `replicated-ckpt status --root ROOT` shows how the uploads there go."

    def __init__(self, checkpoint_id: str, url: str, why: str) -> None:
        said, _, hint = why.partition(HINT_MARK)
        super().__init__(f"Checkpoint {checkpoint_id!r} is not in {url}: {said}", hint or None)
        self.args = (checkpoint_id, url, why)
        self.checkpoint_id = checkpoint_id
        self.url = url


class MetadataUnsafe(ReplicatedCkptError):
    """`.metadata` is not what DCP writes, or names something that DCP metadata does not consist of; it was not believed."""

    default_hint = "Load another checkpoint, and find out who can write to that store: nothing of ours writes such."


class ObjectUnsafe(ReplicatedCkptError):
    """An object in a shard is not loaded by default; none of its code ran, and the planner was not given it.

    `names` are the classes and functions that it names and nothing allows, as pairs of module and name.
    """

    default_hint = (
        "If you trust all that can write this checkpoint with running code here: ReplicatedReader(..., trust_pickles=True) "
        "or --trust-pickles. To go without it, leave it out of the state dict, or of an export with --exclude."
    )

    def __init__(self, fqn: str, where: str, names: Sequence[tuple[str, str]], why: str = "") -> None:
        paths = [name if module == "builtins" else f"{module}.{name}" for module, name in names]
        problem = why or f"it names {', '.join(paths)}, which nothing allows"
        allowing = "".join(f"import {module}; " for module in sorted({module for module, _ in names} - {"builtins"}))
        allowing += f"torch.serialization.add_safe_globals([{', '.join(map(_as_safe_global, paths))}])"
        is_code = all(part.isidentifier() for path in paths for part in path.split("."))  # and no more than names
        how = f"If they are harmless, allow them before the load: `{allowing}`. {self.default_hint}"
        hint = how if names and is_code else None
        super().__init__(f"The object {fqn!r} in {where} is not loaded: {problem}.", hint)
        self.fqn = fqn
        self.where = where
        self.names = tuple((module, name) for module, name in names)
        self.args = (fqn, where, self.names, why)
        self.why = why


def _as_safe_global(path: str) -> str:
    """As torch takes it: a class or function alone, what knows no name of its own, as Ellipsis, with one."""
    knows_its_name = hasattr(vars(builtins).get(path, type), "__qualname__")
    return path if knows_its_name else f"({path}, 'builtins.{path}')"


class PeerProtocolError(ReplicatedCkptError):
    """A peer's agent answered something that the protocol does not allow."""

    default_hint = "Run one version on all nodes (`replicated-ckpt --version`); that agent's log says more."


class AgentUnavailable(ReplicatedCkptError):
    """This node's agent could not be started or does not answer."""

    default_hint = "Read ROOT/.agent/log; `replicated-ckpt agent --root ROOT` starts one in the foreground."


class StoreError(ReplicatedCkptError):
    """An operation on one store failed; `store`, `op` and `key` say which."""

    default_hint = "Check the named store; loads use other copies."

    def __init__(self, store: str, op: str, key: str, detail: str = "", hint: str | None = None) -> None:
        why = detail.rstrip(":. ") or type(self).__name__  # else a traceback, which names the class, would say it twice
        place = store if key == store else f"{key!r} at {store}"
        super().__init__(f"{op} {place}: {why}.", hint)
        self.args = (store, op, key, detail, hint)
        self.store = store
        self.op = op
        self.key = key
        self.detail = detail


class ObjectMissing(StoreError):
    """The store was reached and does not hold the object."""


class ObjectCorrupt(StoreError):
    """The bytes differ from the checksum taken when they were saved; they reached no tensor."""

    default_hint = "Another copy is used if there is one; check the disk and memory of that node, or that object store."


class StoreDenied(StoreError):
    """The store refused the credentials or the permission."""

    default_hint = "Check the token or the file permissions of the named store."


class StoreFull(StoreError):
    """No space is left on the store; nothing was committed there, and the previous checkpoint is intact."""

    default_hint = "Free space or inodes (`df -i`): `replicated-ckpt prune --root ROOT --keep-last N`. Then save again."


class StoreUnavailable(StoreError):
    """The store did not answer in time or the connection broke: neither missing nor intact. The only retried error."""

    default_hint = "Check that the node is up and its agent runs; `replicated-ckpt ls --root ROOT` asks it."
