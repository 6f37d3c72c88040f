"""Lines of the command line about several saves of one name, and several runs in one directory: which one a load takes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from replicated_ckpt.cli.look.checkpoints import LOST, SHORT, WHOLE, CheckpointSeen
from replicated_ckpt.cli.look.nodes import NodesSeen
from replicated_ckpt.cli.look.progress import format_moment
from replicated_ckpt.core.inventory import Holding, SaveFound, lineages_found, saves_found
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.wording import describe_way_out, plural


def describe_conflicting_runs(rows: Sequence[CheckpointSeen], seen: NodesSeen, root: Path) -> list[str]:
    """A few lines for each checkpoint with several saves on the nodes, and for each directory with several runs."""
    row_of = {(row.checkpoint_id, row.save_id): row for row in rows}
    lines: list[str] = []
    by_name: dict[str, list[Holding]] = {}
    for holding in seen.holdings:
        by_name.setdefault(holding.checkpoint_id, []).append(holding)
    for checkpoint_id, holdings in sorted(by_name.items()):
        saves = saves_found(holdings)
        if len(saves) > 1:
            lines += _describe_versions([(save, row_of[checkpoint_id, save.save_id]) for save in saves], seen, root)
    return [*lines, *_describe_runs(seen)]


def _describe_versions(
    versions: Sequence[tuple[SaveFound, CheckpointSeen]], seen: NodesSeen, root: Path
) -> Iterator[str]:
    """Describes the versions under one name. `versions`: in the order in which a load by name tries them."""
    first = versions[0][0]
    of_run = [(save, row) for save, row in versions if save.version.lineage == first.version.lineage]
    taken = next((save for save, row in of_run if row.state in (WHOLE, SHORT)), first)
    name = first.checkpoint_id
    yield f"{name}: {plural(len(versions), 'version')}; a load of this name takes save {taken.save_id}"
    for save, row in versions:
        made = format_moment(row.saved_unix_s)
        yield f"  save {save.save_id} of {made}: {row.describe_copies(seen)}; {_place(save, seen)}"
    named = [(save, row) for save, row in versions if not all(holding.is_replaced for holding in save.holdings)]
    if len({save.version.lineage for save, _ in named}) > 1:
        yield f"next step for {name}: several runs have saved under this name, and neither replaces the other"
        for save, _ in named:
            if save.version.lineage != first.version.lineage:
                on = [holding.node_id for holding in save.holdings if not holding.is_replaced]
                # Another node's root may have another path.
                where = quote(str(root)) if on == [seen.own_node] else "ROOT"
                yield f"  save {save.save_id} of another run: {describe_way_out(name, save.save_id, on, where)}"
    elif named:
        yield _describe_wait(*named[0])


def _place(save: SaveFound, seen: NodesSeen) -> str:
    """The nodes where the save has its name, and those where a newer save has taken the name."""
    named = [holding.node_id for holding in save.holdings if not holding.is_replaced]
    kept = [holding.node_id for holding in save.holdings if holding.is_replaced]
    words = [f"has the name on {seen.list_names(named)}"] if named else []
    return ", ".join([*words, *([f"replaced, but still on {seen.list_names(kept)}"] if kept else [])])


def _describe_wait(newest: SaveFound, row: CheckpointSeen) -> str:
    """Why the older versions are still there."""
    name, newest_id = row.checkpoint_id, newest.save_id
    if row.state in (WHOLE, SHORT):
        return (
            f"{name}: every shard of save {newest_id} was seen, so re-protection removes the older ones once no load "
            "reads them"
        )
    if row.state == LOST:
        return f"{name}: files of save {newest_id} are lost, so the older ones stay until a newer save is complete"
    return (
        f"{name}: the older ones stay until every shard of save {newest_id} was seen. The missing shards may be on the "
        "nodes that were not reached"
    )


def _describe_runs(seen: NodesSeen) -> Iterator[str]:
    saves = saves_found(seen.holdings)
    for scope in sorted({scope_of(save.checkpoint_id) for save in saves}):
        runs = lineages_found(save for save in saves if scope_of(save.checkpoint_id) == scope)
        if len(runs) < 2:
            continue
        where = f"directory {scope}" if scope else "the root"
        yield f"{plural(len(runs), 'run')} in {where}; a load takes the first, which was saved last:"
        for run in runs:
            made = format_moment(run.created_unix_s)
            yield f"  lineage {run.lineage!r}: newest {run.newest_id}, saved at {made}, on {seen.list_names(run.nodes)}"
        yield (
            f"next step for {where}: to load another run, pass `ReplicatedReader(lineage={runs[1].lineage!r})`. Then "
            f"give each run its own directory: on {seen.list_names(runs[1].nodes)} move the checkpoints of the other "
            "run"
        )
