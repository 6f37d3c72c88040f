"""The exceptions of this package, in one tree. The message states what happened and to what; `hint` is the next step."""

import builtins
from collections.abc import Mapping, Sequence

from replicated_ckpt.wording import escape_controls, list_some, next_step, plural

_CHOICES_MAX = 8
HINT_MARK = " Hint: "
"""Between an error's message and its hint, where both are one text."""


class ReplicatedCkptWarning(UserWarning):
    """Something is weaker than asked for, such as fewer copies than wanted. Nothing is lost.

    Or a save replaces a checkpoint of a run that this process neither loaded nor saved.
    """


class ReplicatedCkptError(Exception):
    """Root of all errors of this package.

    `hint` is the operator's next step. Message and hint are one line each: control characters in quoted names are escaped.
    DCP gathers the errors of all ranks by pickle, so every subclass keeps its constructor's arguments in `args`.
    """

    default_hint = "See the runbook: docs/runbook.md."

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = escape_controls(message)
        self.hint = escape_controls(hint or self.default_hint)

    def __str__(self) -> str:
        return f"{self.message}{HINT_MARK}{self.hint}"


class ConfigInvalid(ReplicatedCkptError):
    """An argument, or a combination of arguments, is invalid. Nothing was written."""

    default_hint = "Correct the named argument. Nothing was written."


class CheckpointIdMismatch(ReplicatedCkptError):
    """Ranks passed different checkpoint ids to one save or load; nothing was written or read."""

    default_hint = (
        "Each rank made its own id, such as a timestamp. Derive the id from the step, or broadcast rank 0's: "
        "`ids = [checkpoint_id]; dist.broadcast_object_list(ids, src=0)`. For saves, "
        'ReplicatedWriter(checkpoint_id_from="coordinator") takes rank 0\'s.'
    )

    def __init__(self, id_by_rank: Mapping[int, str]) -> None:
        listed = ", ".join(f"rank {rank}: {checkpoint_id!r}" for rank, checkpoint_id in sorted(id_by_rank.items()))
        super().__init__(f"The ranks passed different checkpoint ids ({listed}).")
        self.args = (dict(id_by_rank),)
        self.id_by_rank = dict(id_by_rank)


class CheckpointExists(ReplicatedCkptError):
    """A committed checkpoint of this id exists and the save has `overwrite=False`; it was left untouched."""

    default_hint = (
        "Use another checkpoint id. Or replace the old checkpoint with ReplicatedWriter(..., overwrite=True): it stays "
        "loadable until the new one is committed."
    )


class ManagerClosed(ReplicatedCkptError):
    """A CheckpointManager was used after `close`; nothing was done."""

    default_hint = "Use the manager inside its `with` block or before close(). Or make a new CheckpointManager."


class ManifestInvalid(ReplicatedCkptError):
    """A manifest does not parse, fails its checksum or contradicts itself; it is not used."""

    default_hint = (
        "If another node has an intact copy, loads use that, and `replicated-ckpt repair --root ROOT` restores "
        "this one."
    )


class ManifestVersionUnknown(ManifestInvalid):
    """A manifest was written by a newer format than this version reads."""

    default_hint = "Upgrade replicated_ckpt to the version that wrote the checkpoint."


class CheckpointNotFound(ReplicatedCkptError):
    """No reachable store holds a committed checkpoint of this id (or any at all, for "latest").

    `unreached`: nodes of this load that did not answer, or the bucket. They may hold it.
    """

    default_hint = (
        "Check the id with `replicated-ckpt ls --root ROOT`. The nodes that hold it must take part in the load."
    )

    def __init__(self, message: str, hint: str | None = None, unreached: Sequence[str] = ()) -> None:
        silent = f"These may hold it: {'; '.join(unreached)}. Bring them back, then load again." if unreached else None
        super().__init__(message, hint or silent)
        self.args = (message, hint, tuple(unreached))
        self.unreached = tuple(unreached)


class CheckpointNotCommitted(CheckpointNotFound):
    """Only an unfinished save of this id exists, which is not a checkpoint."""

    default_hint = (
        'Load an earlier checkpoint, or "latest". The next save or load completes or removes the unfinished save.'
    )


class CheckpointRejected(ReplicatedCkptError):
    """ "latest" was asked for, and users have rejected every complete checkpoint that was found. None was loaded."""

    default_hint = (
        "Load one by its id, or end a rejection: `replicated-ckpt reject ID --undo --root ROOT`, or "
        "`manager.reject(step, undo=True)`."
    )

    def __init__(self, checkpoint_ids: Sequence[str]) -> None:
        named = list_some([*map(repr, checkpoint_ids)], _CHOICES_MAX)
        super().__init__(f"Users have rejected every complete checkpoint that was found: {named}.")
        self.args = (tuple(checkpoint_ids),)
        self.checkpoint_ids = tuple(checkpoint_ids)


class CheckpointAmbiguous(ReplicatedCkptError):
    """Nodes hold different files of one name for a checkpoint without a manifest: two runs used its id. None was read."""

    default_hint = (
        "Compare the time stamps of this file on the nodes above, to find those with the run that you want. On the others, "
        "move the checkpoint's directory away."
    )

    def __init__(self, checkpoint_id: str, name: str, file_by_node: Mapping[str, str]) -> None:
        listed = "; ".join(f"node {node}: {file}" for node, file in sorted(file_by_node.items()))
        super().__init__(
            f"Checkpoint {checkpoint_id!r} has no manifest, and nodes hold different {name}: {listed}. "
            "Without a manifest, it is unknown which of these files belong together."
        )
        self.args = (checkpoint_id, name, dict(file_by_node))
        self.checkpoint_id, self.name, self.file_by_node = checkpoint_id, name, dict(file_by_node)


class AckNotReached(ReplicatedCkptError):
    """A shard has too few copies, and `on_degraded` is "raise". Or a save is decided, but a shard is published nowhere."""

    default_hint = 'Bring the lost node back, or save with on_degraded="warn" to continue with fewer copies.'

    def __init__(self, wanted: int, have: Mapping[str, int], why: str = "", hint: str | None = None) -> None:
        listed = ", ".join(f"{shard}: {count}" for shard, count in sorted(have.items()))
        super().__init__(f"Wanted {wanted} copies of every shard, have {listed}. {why}".rstrip(), hint)
        self.args = (wanted, dict(have), why, hint)
        self.wanted = wanted
        self.have = dict(have)


class ReplicasDiverged(ReplicatedCkptError):
    """Replicas of a tensor differ between ranks, and `on_divergence` is "raise". Nothing was committed."""

    default_hint = (
        "Load the newest checkpoint, which makes the replicas alike, and find out why they differ: docs/replicas.md has "
        "the usual causes. If these values may differ, name them in may_differ=[...]."
    )

    def __init__(self, checkpoint_id: str, found: str) -> None:
        super().__init__(f"{checkpoint_id!r} is not saved, as replicas have diverged: {found}.")
        self.args = (checkpoint_id, found)
        self.checkpoint_id = checkpoint_id


class ShardLost(ReplicatedCkptError):
    """No intact copy of these shards was found. No tensor got a wrong byte. `is_latest`: the load asked for "latest"."""

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


class OptimizerDropped(ReplicatedCkptError):
    """A load asks for the optimizer of a checkpoint that keeps its weights alone; no tensor was changed.

    `dropped`: the prefixes of the names of the dropped entries. `newest_full`: the newest full checkpoint of the run that
    the load has seen, or "".
    """

    def __init__(self, checkpoint_id: str, dropped: Sequence[str], newest_full: str = "") -> None:
        names = list_some([*map(repr, dropped)], _CHOICES_MAX)
        full = f"load {newest_full!r}, the newest full checkpoint" if newest_full else "load a newer checkpoint"
        super().__init__(
            f"Checkpoint {checkpoint_id!r} keeps its weights alone: {names} was dropped, by Retention(full_last=...) or "
            "`replicated-ckpt slim`.",
            f"Leave {names} out of the state dict to load the weights, or {full}; `ls` lists which are full.",
        )
        self.args = (checkpoint_id, tuple(dropped), newest_full)
        self.checkpoint_id, self.dropped, self.newest_full = checkpoint_id, tuple(dropped), newest_full


class SaveAborted(ReplicatedCkptError):
    """This save was aborted, or another save of the id began; the previous checkpoint of this id still loads."""

    default_hint = (
        "Read the error of the first rank that failed. If no rank failed, look for a second job on this root."
    )


class SaveSuperseded(SaveAborted):
    """A newer save, of this run or another, has the checkpoint's name on this node. Both are kept until it is complete."""

    default_hint = (
        "Load the checkpoint to get the newer save. This save's files are deleted once the newer one is complete."
    )


class LineagesMet(ReplicatedCkptError):
    """Checkpoints of several runs lie in one directory of ids, and `lineage` does not select one of them."""

    default_hint = (
        'Pass ReplicatedReader(lineage="<one of those named above>"), or omit it to load the run that was saved last. Then '
        "give each run its own directory."
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
            f"'latest' is the newest checkpoint of one directory of ids, but {len(choices)} directories have checkpoints.",
            f"Pass one of these: {named}.",
        )
        self.args = (tuple(choices),)
        self.choices = tuple(choices)


class RendezvousFailed(ReplicatedCkptError):
    """Some ranks did not join a save or load over the c10d store in time."""

    default_hint = (
        "Read those ranks' logs: all ranks must make this call. To load on one rank alone, pass no_dist=True."
    )


class RankFailed(ReplicatedCkptError):
    """A rank has ended, or failed with another package's error. The other ranks of the save or load raise this."""

    default_hint = "Read the log of that rank: it has the error with its traceback."


class UploadFailed(ReplicatedCkptError):
    """A checkpoint is not in the object store. The copies on the nodes are safe."""

    default_hint = "The copies on the nodes are safe. `replicated-ckpt status --root ROOT` shows their uploads."

    def __init__(self, checkpoint_id: str, url: str, why: str) -> None:
        said, _, hint = why.partition(HINT_MARK)
        super().__init__(f"Checkpoint {checkpoint_id!r} is not in {url}: {said}", hint or None)
        self.args = (checkpoint_id, url, why)
        self.checkpoint_id = checkpoint_id
        self.url = url


class MetadataUnsafe(ReplicatedCkptError):
    """`.metadata` is not what DCP writes, or names a class that DCP metadata does not use. None of its code ran."""

    default_hint = "Load another checkpoint, and find out who can write to that store: no save writes such a file."


class ObjectUnsafe(ReplicatedCkptError):
    """An object in a shard is not loaded by default. None of its code ran, and the planner did not get it.

    `names` are its classes and functions that are not allowed, as pairs of module and name.
    """

    default_hint = (
        "If you would let all who can write this checkpoint run code here, pass ReplicatedReader(..., trust_pickles=True) "
        "or --trust-pickles. To load without the object, leave it out of the state dict, or of an export with --exclude."
    )

    def __init__(self, fqn: str, where: str, names: Sequence[tuple[str, str]], why: str = "") -> None:
        paths = [name if module == "builtins" else f"{module}.{name}" for module, name in names]
        problem = why or f"it names {', '.join(paths)}, which is not allowed"
        allowing = "".join(f"import {module}; " for module in sorted({module for module, _ in names} - {"builtins"}))
        allowing += f"torch.serialization.add_safe_globals([{', '.join(map(_as_safe_global, paths))}])"
        # A checkpoint chooses these names: a hint to paste must not contain other code.
        are_names = all(part.isidentifier() for path in paths for part in path.split("."))
        how = f"If the names are harmless, allow them before the load: `{allowing}`. {self.default_hint}"
        hint = how if names and are_names else None
        super().__init__(f"The object {fqn!r} in {where} is not loaded: {problem}.", hint)
        self.fqn = fqn
        self.where = where
        self.names = tuple((module, name) for module, name in names)
        self.args = (fqn, where, self.names, why)
        self.why = why


def _as_safe_global(path: str) -> str:
    """The argument of `add_safe_globals` for the object. Objects without a name, such as Ellipsis, need one."""
    has_name = hasattr(vars(builtins).get(path, type), "__qualname__")
    return path if has_name else f"({path}, 'builtins.{path}')"


class PeerProtocolError(ReplicatedCkptError):
    """A peer's agent sent an answer that the protocol does not allow."""

    default_hint = "Run one version on all nodes (`replicated-ckpt --version`), and read ROOT/.agent/log on both nodes."


class AgentUnavailable(ReplicatedCkptError):
    """This node's agent could not be started or does not answer."""

    default_hint = "Read ROOT/.agent/log, or start an agent in the foreground: `replicated-ckpt agent --root ROOT`."


class StoreError(ReplicatedCkptError):
    """An operation on one store failed; `store`, `op` and `key` name it."""

    default_hint = "Check the named store. Loads use other copies."

    def __init__(self, store: str, op: str, key: str, detail: str = "", hint: str | None = None) -> None:
        why = detail.rstrip(":. ") or type(self).__name__  # not both: a traceback names the class anyway
        place = store if key in ("", store) else f"{key!r} at {store}"
        super().__init__(f"{op} {place}: {why}.", hint)
        self.args = (store, op, key, detail, hint)
        self.store = store
        self.op = op
        self.key = key
        self.detail = detail


class ObjectMissing(StoreError):
    """The store was reached and does not hold the object."""


class ObjectCorrupt(StoreError):
    """The bytes differ from the checksum of the save; they reached no tensor."""

    default_hint = (
        "Loads use another copy if there is one. Check the disk and memory of that node, or that object store."
    )


class StoreDenied(StoreError):
    """The store refused the credentials or the permission."""

    default_hint = "Check the token, or the file permissions, of the named store."


class StoreFull(StoreError):
    """The store has no space left. Nothing was committed in it, and the previous checkpoint is intact."""

    default_hint = (
        "Free space or inodes (`df -i`), for example with `replicated-ckpt prune --root ROOT --keep-last N "
        "--keep-in-bucket`. Then save again."
    )


class StoreUnavailable(StoreError):
    """The store did not answer in time, or the connection broke. Only this error is retried."""

    default_hint = "Check that the node is up and its agent runs. `replicated-ckpt ls --root ROOT` queries it."
