"""Saved entries that a load does not ask for: DCP leaves them where they are, and reports success."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from replicated_ckpt.dcp.planning.held_plan import names_asked
from replicated_ckpt.dcp.rank_state.items import find_world

_PREFIXES_MAX = 8
_ADVICE = (
    "They are not restored. A new optimizer's state_dict() names no state: take get_state_dict of "
    "torch.distributed.checkpoint.state_dict, which does. If only a part is wanted, pass "
    "ReplicatedReader(expect_partial=True)."
)


def describe_unasked(checkpoint_id: str, saved: Mapping[str, STORAGE_TYPES], plans: Sequence[LoadPlan]) -> str | None:
    """A warning about the saved entries for which no rank's plan asks, None where there are none."""
    asked = names_asked(plans)
    unasked = [name for name, entry in saved.items() if name not in asked and _has_content(entry)]
    unasked = [name for name in unasked if find_world(name) in (None, len(plans))]  # RankState speaks of other worlds
    if not unasked:
        return None
    count_by_prefix = count_prefixes(unasked, asked)
    listed = sorted(count_by_prefix.items(), key=lambda one: (-one[1], one[0]))
    told = [f"{prefix!r} ({count})" for prefix, count in listed[:_PREFIXES_MAX]]
    if len(listed) > _PREFIXES_MAX:
        told.append(f"and under {len(listed) - _PREFIXES_MAX} other names")
    total = sum(map(_has_content, saved.values()))
    return (
        f"The load of checkpoint {checkpoint_id!r} leaves {len(unasked)} of {total} saved entries unasked, under "
        f"{', '.join(told)}. {_ADVICE}"
    )


def count_prefixes(unasked: Collection[str], asked: Collection[str]) -> Mapping[str, int]:
    """How many of the unasked names lie under each prefix: for each name the shortest under which nothing was asked."""
    met = {prefix for name in asked for prefix in _prefixes(name)}
    return Counter(next((prefix for prefix in _prefixes(name) if prefix not in met), name) for name in unasked)


def _prefixes(name: str) -> Iterator[str]:
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def _has_content(entry: STORAGE_TYPES) -> bool:
    """Whether a load asks for it at all: DCP's planners plan no read of a tensor without elements."""
    return not (isinstance(entry, TensorStorageMetadata) and 0 in entry.size)
