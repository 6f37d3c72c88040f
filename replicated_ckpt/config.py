"""Settings, frozen and validated once: of the writer, the reader, the manager and the agent."""

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, SupportsIndex, get_args

from replicated_ckpt.environment import (
    AGENT_ENV_PREFIX,
    DIRECT_IO_ENV,
    PORT_ENV,
    TLS_CERT_ENV,
    TLS_KEY_ENV,
    check_encodable,
    check_switches,
    make_absolute,
)
from replicated_ckpt.errors import ConfigInvalid

Ack = Literal["local", "peer-memory", "peer", "object"]
OnDegraded = Literal["warn", "raise"]
OnDivergence = Literal["warn", "raise"]
CheckpointIdFrom = Literal["all", "coordinator"]
DirectIO = Literal["auto", "on", "off"]
BestIs = Literal["min", "max"]

NEWEST_LINEAGE = "newest"
REFUSE_LINEAGES = "refuse"
DRAIN_S = 120.0
LEAVE_WITHIN_S = 150.0
"""An agent with the default `drain_s` exits within this time after it is told to stop."""
_NO_ROOT = "Pass the path of a directory; a bucket belongs in object_store=."
_COPIES_MAX, _PORT_MAX = 16, 65535
MAY_DIFFER = ("*running_mean", "*running_var")
"""BatchNorm's statistics: under DDP each rank has those of its own data until the next forward pass."""
COMPARED_WITHIN = 16
"""Saves in which each replicated value is compared once. So diverged replicas are found within a few hours, for less than
1 % of the time of a save.
"""
NICE_MAX = 19
PART_MIB = (5, 512)
"""Least and greatest size of a part of an upload: S3 refuses smaller parts, and an agent holds eight in memory."""
_PAUSE_S_MAX = 1e9
"""Upper limit of pauses: `Event.wait` raises OverflowError for much longer ones, which would end the thread."""


def check_root(root: object) -> str:
    """The absolute path of a directory for a store.

    Raises:
        ConfigInvalid: `root` is not a path of a directory on this node.
    """
    check_switches()
    text = os.fspath(root) if isinstance(root, os.PathLike) else root
    if not isinstance(text, str) or not text or "\0" in text or "://" in text:
        raise ConfigInvalid(f"root must be a directory on this node's disk, not {text!r}.", _NO_ROOT)
    # No shell expands it here: a folder named ~ would be made in the working directory.
    if text.split("/")[0] == "~":
        raise ConfigInvalid(
            f"root {text!r} would be a directory with the name ~.", f"Pass os.path.expanduser({text!r})."
        )
    check_encodable("root", text)
    return make_absolute(text)


def check_callable(name: str, value: object) -> None:
    """Raises ConfigInvalid: the hook is neither None nor callable."""
    if value is not None and not callable(value):
        raise ConfigInvalid(f"{name} must be a function, not {value!r}.")


def check_number(name: str, value: SupportsIndex, least: int = 1, most: int | None = None) -> int:
    """The number as an int. numpy's integers and tensors of one integer are accepted, too.

    Raises:
        ConfigInvalid: `value` is not a whole number from `least` to `most`.
    """
    try:
        number = index(value)
    except (TypeError, RuntimeError):  # a tensor on the meta device has no number
        number = least - 1
    # True would count as 1.
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        bounds = f"from {least}" if most is None else f"from {least} to {most}"
        raise ConfigInvalid(f"{name} must be a whole number {bounds}, not {value!r}.")
    return number


def check_direct_io(mode: str | None) -> DirectIO:
    """The mode of direct I/O. For None it comes from the environment variable, and is "auto" if that is not set.

    Raises:
        ConfigInvalid: there is no such mode.
    """
    mode = os.environ.get(DIRECT_IO_ENV) or "auto" if mode is None else mode
    if mode not in get_args(DirectIO):
        raise ConfigInvalid(f"direct_io (or {DIRECT_IO_ENV}) must be one of {get_args(DirectIO)}, not {mode!r}.")
    return mode  # type: ignore[return-value]  # checked above


def parse_ports(text: str) -> range:
    """The ports in a text such as "29600" or "29600-29631". Empty for "" and "0": the agent may take any port.

    Raises:
        ConfigInvalid: the text is neither a port nor a range.
    """
    if text in ("", "0"):
        return range(0)
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= _PORT_MAX:
        raise ConfigInvalid(
            f"port (or {PORT_ENV}) must be a port from 1 to {_PORT_MAX} or a range such as 29600-29631, not {text!r}."
        )
    return range(first, last + 1)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints of a run a tier keeps: the newest `keep_last`, and every `keep_every`-th by sequence as well.

    The sequence counts the saves of a run, restarts included. With `keep_every=None` no checkpoint is kept for its
    sequence. `keep_best` names a metric that is saved with the checkpoints. The checkpoint with its smallest value is kept,
    too; with `best_is="max"`, the one with its largest. If several have the best value, the newest of them is kept. A
    checkpoint without the metric, or with an infinite or NaN value, is never the best.

    With `keep_period=1000`, a checkpoint is kept if its step is a multiple of 1000. The step is the number at the end
    of the id: 2000 of `step-2000`. Of several versions of one id, the newest complete one is kept.

    With `full_last`, only the newest `full_last` complete checkpoints keep their optimizer. Older ones that are kept
    lose the optimizer's files. A load of the model alone still works, even with stock torch. A load that asks for the
    optimizer raises OptimizerDropped. With `full_last=None` every kept checkpoint stays as it is.

    Raises:
        ConfigInvalid: a number is not a whole number of at least 1. `full_last` exceeds `keep_last`. `keep_best` is empty
            or not a string. `best_is` is neither "min" nor "max".
    """

    keep_last: int
    keep_every: int | None = None
    keep_best: str | None = None
    best_is: BestIs = "min"
    full_last: int | None = None
    keep_period: int | None = None

    def __post_init__(self) -> None:
        if self.keep_best is not None and (not isinstance(self.keep_best, str) or not self.keep_best):
            raise ConfigInvalid(f"Retention(keep_best=...) must be the name of a metric, not {self.keep_best!r}.")
        if self.best_is not in get_args(BestIs):
            raise ConfigInvalid(f"Retention(best_is=...) must be one of {get_args(BestIs)}, not {self.best_is!r}.")
        object.__setattr__(self, "keep_last", check_number("Retention(keep_last=...)", self.keep_last))
        for name in ("keep_every", "keep_period"):
            number = getattr(self, name)
            if number is not None:
                object.__setattr__(self, name, check_number(f"Retention({name}=...)", number))
        if self.full_last is not None:
            name = "Retention(full_last=...)"
            object.__setattr__(self, "full_last", check_number(name, self.full_last, most=self.keep_last))


@dataclass(frozen=True)
class WriterConfig:
    """The settings of a writer. See ReplicatedWriter for the meaning of each field.

    Raises:
        ConfigInvalid: an argument is invalid; the error names it.
    """

    root: str
    copies: int
    ack: Ack
    domain: str | None
    on_degraded: OnDegraded
    overwrite: bool
    object_store: str | None = None
    object_every: int = 1
    retention: Retention | None = None
    object_retention: Retention | None = None
    checkpoint_id_from: CheckpointIdFrom = "all"
    direct_io: DirectIO = "auto"
    overlap: bool = False
    compare_replicas: int | Literal["all"] | None = COMPARED_WITHIN
    on_divergence: OnDivergence = "warn"
    may_differ: Sequence[str] = MAY_DIFFER
    link_unchanged: bool = True

    def __post_init__(self) -> None:
        domain = self.domain
        object.__setattr__(self, "copies", check_number("copies", self.copies, most=_COPIES_MAX))
        object.__setattr__(self, "object_every", check_number("object_every", self.object_every))
        for name, choice, choices in (
            ("ack", self.ack, Ack),
            ("on_degraded", self.on_degraded, OnDegraded),
            ("checkpoint_id_from", self.checkpoint_id_from, CheckpointIdFrom),
            ("on_divergence", self.on_divergence, OnDivergence),
        ):
            if choice not in get_args(choices):
                raise ConfigInvalid(f"{name} must be one of {get_args(choices)}, not {choice!r}.")
        if domain is not None and (not isinstance(domain, str) or not domain):
            raise ConfigInvalid(f"domain must be a name such as a rack's, not {domain!r}.")
        switch, retention = (bool, "True or False"), (Retention | None, "a Retention, such as Retention(keep_last=3)")
        typed = {"overwrite": switch, "overlap": switch, "retention": retention, "object_retention": retention}
        for name, (kind, wanted) in typed.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigInvalid(f"{name} must be {wanted}, not {value!r}.")
        # A string would be taken as a sequence of patterns of one letter each.
        if isinstance(self.may_differ, str) or not all(isinstance(pattern, str) for pattern in self.may_differ):
            raise ConfigInvalid(f'may_differ must be patterns of names, such as ["rng.*"], not {self.may_differ!r}.')
        object.__setattr__(self, "may_differ", tuple(self.may_differ))
        if self.compare_replicas is not None and self.compare_replicas != "all":
            object.__setattr__(self, "compare_replicas", check_number("compare_replicas", self.compare_replicas))
        of_bucket = {'ack="object"': self.ack == "object", "object_every": self.object_every > 1}
        of_bucket["object_retention"] = self.object_retention is not None
        for name, is_given in of_bucket.items():
            if is_given and self.object_store is None:
                raise ConfigInvalid(f'{name} needs object_store, such as "s3://bucket/prefix".')

    @property
    def parts_compared(self) -> int | None:
        """In this number of saves, each value that several ranks hold is compared once. None: no value is compared."""
        return 1 if self.compare_replicas == "all" else self.compare_replicas

    @property
    def must_have_all_copies(self) -> bool:
        """Whether a save with too few copies fails. Never with ack="local", which makes the copies after the save."""
        return self.on_degraded == "raise" and self.ack != "local"

    def check_awaitable(self, wanted: str) -> None:
        """Checks that a save of this writer reaches the level `wanted` by itself.

        Raises:
            ConfigInvalid: it never does, or there is no such level.
        """
        levels = get_args(Ack)
        if wanted not in levels:
            raise ConfigInvalid(f"wait(ack=...) must be one of {levels}, not {wanted!r}.")
        # Agents upload in the background: every save gets there, whatever its own ack.
        if wanted == "object" and self.object_store is not None:
            return
        if levels.index(wanted) > levels.index(self.ack):
            raise ConfigInvalid(
                f"wait(ack={wanted!r}) would wait forever: the saves of this writer reach only {self.ack!r}.",
                f"Pass ReplicatedWriter(ack={wanted!r}), or wait for a lower level.",
            )


@dataclass(frozen=True)
class ReaderConfig:
    """The stores and the run that a reader uses. With `root` None it reads the object store alone.

    Raises:
        ConfigInvalid: an argument is invalid; the error names it.
    """

    root: str | None
    object_store: str | None = None
    lineage: str = NEWEST_LINEAGE

    def __post_init__(self) -> None:
        if self.root is None and self.object_store is None:
            raise ConfigInvalid("A reader needs a root, an object_store, or both.")
        is_text = isinstance(self.lineage, str)
        if not is_text or not re.fullmatch(f"{NEWEST_LINEAGE}|{REFUSE_LINEAGES}|[0-9a-f]{{16}}", self.lineage):
            raise ConfigInvalid(
                f'lineage must be "newest", "refuse" or the 16 hexadecimal digits from a warning, not {self.lineage!r}.'
            )


@dataclass(frozen=True)
class ManagerConfig:
    """When a CheckpointManager saves: at each multiple of `every`, and after one of the signals `preempt_on`.

    With a memory tier, every `disk_every`-th save goes to the disk.

    Raises:
        ConfigInvalid: an argument is invalid; the error names it.
    """

    every: int
    preempt_on: tuple[str, ...]
    disk_every: int = 1

    def __post_init__(self) -> None:
        for name in ("every", "disk_every"):
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        names: object = self.preempt_on
        if not isinstance(names, tuple) or not set(names) <= set(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}:
            raise ConfigInvalid(
                f'preempt_on must be names of signals that can be caught, such as ("SIGTERM",), not {names!r}.'
            )


@dataclass(frozen=True)
class AgentConfig:
    """The settings of an agent. Raises ConfigInvalid: an argument is invalid; the error names it.

    Args:
        root: the node's store.
        host: the address that the agent listens on.
        port: a port, or a range of which the agent takes the first free one. It prefers its last port. If `port` is empty
            and the last port is taken, the agent takes any free one.
        idle_exit_s: the agent exits after so many seconds without clients and work. None: it runs until it is told to stop.
        lost_after_s: seconds for which the copies of a silent peer still count.
        away_after_s: the same for a peer that has announced its exit.
        copy_mib_per_s: pace of re-protection and of submitted shards, together. None: no limit, except for re-protection:
            256 while the node saves or loads, and 16 while its ranks fetch. Submitted shards have at least 8.
        scrub_mib_per_s, scrub_every_s: pace of the scrub, and pause between two passes.
        round_every_s: pause between two rounds of re-protection while there is nothing to do.
        drain_s: seconds for which the agent waits for open saves after it is told to stop; at most 120.
        upload_mib_per_s: pace of uploads to the object store.
        upload_part_mib: size of the parts of an upload to S3. An agent holds eight parts in memory.
        nice: niceness, 0 to 19, of the agent's threads that write and receive shards of asynchronous saves. If the kernel
            schedules by session (autogroup), of all its threads.
        tls_cert, tls_key: PEM files of a certificate and its key. Without them, an agent that listens beyond loopback makes
            a certificate.
        direct_io: mode of direct I/O for copies, see `check_direct_io`.
    """

    root: str
    host: str = "127.0.0.1"
    port: str = ""
    idle_exit_s: float | None = None
    lost_after_s: float = 30.0
    away_after_s: float = 3600.0
    copy_mib_per_s: float | None = None
    scrub_mib_per_s: float = 32.0
    scrub_every_s: float = 86400.0
    round_every_s: float = 15.0
    drain_s: float = DRAIN_S
    upload_mib_per_s: float = 1024.0
    upload_part_mib: int = 16
    nice: int = 10
    tls_cert: str = ""
    tls_key: str = ""
    direct_io: str | None = None

    def __post_init__(self) -> None:
        parse_ports(self.port)
        if self.idle_exit_s is not None and not self.idle_exit_s > 0:
            raise ConfigInvalid(f"idle_exit_s must be positive, not {self.idle_exit_s}.")
        paces = ("copy_mib_per_s", "scrub_mib_per_s", "upload_mib_per_s")
        for name in (*paces, "lost_after_s", "away_after_s", "scrub_every_s", "round_every_s", "drain_s"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigInvalid(f"{_with_variable(name)} must be positive, not {getattr(self, name)}.")
        for name in ("scrub_every_s", "round_every_s"):
            if getattr(self, name) > _PAUSE_S_MAX:
                raise ConfigInvalid(
                    f"{_with_variable(name)} must be at most {_PAUSE_S_MAX:g}, not {getattr(self, name):g}."
                )
        if not 0 <= self.nice <= NICE_MAX:
            raise ConfigInvalid(f"{_with_variable('nice')} must be 0 to {NICE_MAX}, not {self.nice}.")
        least, most = PART_MIB
        if not least <= self.upload_part_mib <= most:
            name = _with_variable("upload_part_mib")
            raise ConfigInvalid(f"{name} must be {least} to {most}, not {self.upload_part_mib}.")
        # Ranks wait DRAIN_S for an agent that stops, so a longer drain would fail their saves.
        if self.drain_s > DRAIN_S:
            problem = f"{_with_variable('drain_s')} must be at most {DRAIN_S:g}, not {self.drain_s:g}"
            raise ConfigInvalid(f"{problem}: a rank that begins a save waits at most that long for the agent to exit.")
        # With only one of them, the agent would quietly make a certificate of its own.
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigInvalid(f"tls_cert and tls_key (or {TLS_CERT_ENV} and {TLS_KEY_ENV}) must be set together.")
        object.__setattr__(self, "direct_io", check_direct_io(self.direct_io))
        object.__setattr__(self, "root", check_root(self.root))


def _with_variable(option: str) -> str:
    """The name of an agent's option, and the variable that sets it for agents that ranks start."""
    return f"{option} (or {AGENT_ENV_PREFIX}{option.upper()})"
