"""Retention policies as nodes exchange them: the checkpoints that they cover, and the merge of two policies."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import index
from posixpath import dirname
from typing import Any

from replicated_ckpt.config import Retention
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX, is_checkpoint_id, is_lineage, is_save_id
from replicated_ckpt.core.upkeep.marks import NO_MARKS, Marks

NODES = ""
"""The tier of the nodes. The object tier is identified by its URL."""
_URL_CHARS_MAX = 4096


@dataclass(frozen=True)
class Policy:
    """A run's retention in one tier. `scope` is the directory of its checkpoints' ids, "" for plain names.

    `lineage` is the run's: checkpoints of other runs are neither counted nor removed (I3). `revision` is the sequence of
    the save that set the policy. `retention` None: everything is kept.
    """

    scope: str
    tier: str
    revision: int
    retention: Retention | None
    lineage: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.scope, self.tier, self.lineage

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Policy":
        """Raises ValueError, KeyError, TypeError, ConfigInvalid: the fields are no policy; the caller names the source."""
        kept = fields["retention"]
        retention = None if kept is None else _retention_from_json(kept)
        lineage = str(fields.get("lineage", ""))
        policy = cls(str(fields["scope"]), str(fields["tier"]), index(fields["revision"]), retention, lineage)
        if (
            not (policy.scope == "" or is_checkpoint_id(policy.scope))
            or not 0 <= policy.revision <= SEQUENCE_FLOOR_MAX
            or len(policy.tier) > _URL_CHARS_MAX
            or not is_lineage(lineage)
        ):
            raise ValueError(f"not a valid policy: {policy!r}"[:500])
        return policy


def _retention_from_json(fields: Mapping[str, Any]) -> Retention:
    """The retention in a policy. Agents of older versions send only the first two fields, or the first five."""
    later = {name: fields[name] for name in ("keep_best", "best_is", "full_last", "keep_period") if name in fields}
    return Retention(keep_last=fields["keep_last"], keep_every=fields["keep_every"], **later)


def scope_of(checkpoint_id: str) -> str:
    """The directory of a checkpoint id. A policy applies to one directory."""
    return dirname(checkpoint_id)


def find_series_name(checkpoint_id: str) -> str | None:
    """For an id such as `run/step_10/ema`, the name under which a policy can count it: `run-ema/step_10`.

    A policy covers the checkpoints of one directory, and never removes the newest. `run/step_10/` has only one checkpoint
    of its kind, so under its own id it would never be removed. None: the id is not of that form.
    """
    above, name = scope_of(checkpoint_id), checkpoint_id.rpartition("/")[2]
    # Only `run/step_10/ema`: a name that ends with a number is counted by itself.
    if not above[-1:].isdecimal() or name[-1:].isdecimal():
        return None
    run, _, step = above.rpartition("/")
    return f"{run}-{name}/{step}" if run else f"{name}/{step}"


def merge_policies(own: Policy, received: Policy) -> Policy:
    """The newer of two policies of one scope and tier. If one save set different ones, everything is kept.

    The result does not depend on the order in which nodes exchange policies, so all nodes agree in the end.
    """
    if own.revision != received.revision:
        return max(own, received, key=lambda policy: policy.revision)
    # Keeping everything is the only answer that removes nothing wanted by either.
    return own if own.retention == received.retention else replace(own, retention=None)


def agree(policies: Iterable[Policy]) -> tuple[Policy, ...]:
    """The policies that result from those of all nodes: the newest for each scope, tier and lineage, in any order."""
    by_key: dict[tuple[str, str, str], Policy] = {}
    for policy in policies:
        by_key[policy.key] = merge_policies(by_key.get(policy.key, policy), policy)
    return tuple(by_key.values())


def confirm(agreed: Iterable[Policy], own: Iterable[Policy]) -> tuple[Policy, ...]:
    """The agreed policies that equal those of this node's own ranks. This node removes checkpoints only by these."""
    # A peer alone must not make this node remove files: its own ranks must want the same.
    wanted = {policy.key: policy.retention for policy in own}
    return tuple(policy for policy in agreed if policy.key in wanted and wanted[policy.key] == policy.retention)


@dataclass(frozen=True)
class NodeReport:
    """A node's report, which comes with its holdings: policies, marks, and the state of uploads. Removals depend on it.

    `uploading`: saves that, to the node's knowledge, are not in the bucket yet. `uploaded`: saves that are in the
    bucket, or need not be. `ordered`: the saves in `uploading` that a user ordered by hand; they always count.
    `removed`: saves that the node's own user removed by hand. `unable`: the saves in `uploading` that the node cannot
    upload: no rank there has named the bucket, or its key is refused. `absent`: the saves in `uploaded` that are not in
    the bucket, because they were removed there or not kept. `is_busy`: the node may be making copies now. `is_drained`:
    its user is taking it down, so its copies do not count for other drained nodes.
    """

    policies: tuple[Policy, ...] = ()
    uploading: frozenset[str] = frozenset()
    uploaded: frozenset[str] = frozenset()
    ordered: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    unable: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    is_busy: bool = field(default=False, kw_only=True)
    is_drained: bool = field(default=False, kw_only=True)
    marks: Marks = field(default=NO_MARKS, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "policies": [policy.to_json() for policy in self.policies],
            "uploading": sorted(self.uploading),
            "uploaded": sorted(self.uploaded),
            "ordered": sorted(self.ordered),
            "removed": sorted(self.removed),
            "unable": sorted(self.unable),
            "absent": sorted(self.absent),
            "is_busy": self.is_busy,
            "is_drained": self.is_drained,
            "marks": self.marks.to_json(),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "NodeReport":
        """The inverse of `to_json`. Agents of older versions omit fields. Raises as `Policy.from_json`."""
        return cls(
            tuple(Policy.from_json(entry) for entry in fields.get("policies", ())),
            *(_save_ids(fields.get(name, ())) for name in _SAVES),
            is_busy=fields.get("is_busy") is True,
            is_drained=fields.get("is_drained") is True,
            marks=Marks.from_json(fields["marks"]) if "marks" in fields else NO_MARKS,
        )


_SAVES = ("uploading", "uploaded", "ordered", "removed", "unable", "absent")
NOTHING_REPORTED = NodeReport()


def _save_ids(found: Iterable[Any]) -> frozenset[str]:
    return frozenset(text for text in map(str, found) if is_save_id(text))


def pending(node_reports: Iterable[NodeReport]) -> frozenset[str]:
    """The saves with an unfinished upload. If any node reports a save as uploaded, only an order by hand still counts."""
    said = tuple(node_reports)
    uploading = frozenset[str]().union(*(one.uploading for one in said))
    uploaded = frozenset[str]().union(*(one.uploaded for one in said))
    return uploading - uploaded | frozenset[str]().union(*(one.ordered for one in said))
