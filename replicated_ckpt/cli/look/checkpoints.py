"""The rows of `ls`: when each checkpoint was saved, its size, the places of its copies, and its missing files."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from replicated_ckpt.agent.repair.audit import is_removed_everywhere
from replicated_ckpt.cli.look.nodes import (
    NodesSeen,
    advise_on_lost,
    advise_on_silence,
    advise_on_unknown_nodes,
    describe_spare,
    look_at_nodes,
    on_each_host,
)
from replicated_ckpt.cli.look.progress import format_moment, format_table
from replicated_ckpt.cli.printing import Colour, paint
from replicated_ckpt.core.inventory import SaveFound, saves_found
from replicated_ckpt.core.layout import METADATA_NAME, OBJECT_NODE, find_step, is_checkpoint_id
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.seen_save import SeenSave, see_save
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.core.reading.unmanaged_files import UnmanagedCheckpoint
from replicated_ckpt.core.upkeep.marks import Marks, merge_marks
from replicated_ckpt.core.upkeep.policy import pending
from replicated_ckpt.core.upkeep.unclaimed_files import recognize
from replicated_ckpt.errors import (
    CheckpointAmbiguous,
    CheckpointNotFound,
    ConfigInvalid,
    ManifestVersionUnknown,
    MetadataUnsafe,
    PeerProtocolError,
    ReplicatedCkptError,
    StoreError,
)
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.peers.unmanaged_audit import UnmanagedLook
from replicated_ckpt.stores.bucket.bucket import BucketSave
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import describe_bytes, list_some, plural

HEADER = ("ID", "SAVED AT", "STEP", "CONTENT", "SIZE", "COPIES", "HOSTS", "BUCKET")
FULL, WEIGHTS = "full", "weights"
WHOLE, SHORT, NOT_SEEN, LOST, OVERWRITTEN = "whole", "short", "not seen", "lost", "overwritten"
DAMAGED, UNMANAGED, IN_BUCKET, REMOVED = "manifest damaged", "unmanaged", "in the bucket", "being removed"
RETIRED = "being retired"
_HOSTS_MAX = 4
_NAMED_MAX = 4


@dataclass(frozen=True)
class CheckpointSeen:
    """One save, or files of one, as `ls` lists it. An unknown value is None.

    `state` is one of the states above. `copies_seen` is the number of copies of the shard that has the fewest. `hosts_seen`
    is the smallest number of hosts, or of named domains, that have copies of a shard. `missing` are the files of which no
    intact copy was seen. `not_reached` are the nodes that should have a copy of a file with too few copies, but did not
    answer. `removed_on` are the nodes whose user has removed the save. `bucket` is "there", "on its way", "refused", "not
    there", "unknown", or "" if the save is not meant for a bucket. `is_mendable`: damaged copies of each missing file may
    together make an intact copy. `content`: "full"; "weights" if a node that has it, or else the bucket, has dropped its
    optimizer; "" if that is unknown. `is_rejected`: a user has rejected it, so "latest" skips it.
    """

    checkpoint_id: str
    state: str
    nodes: tuple[str, ...]
    save_id: str = ""
    sequence: int = 0
    lineage: str = ""
    saved_unix_s: float = 0.0
    size_bytes: int | None = None
    copies_wanted: int | None = None
    copies_seen: int | None = None
    hosts_seen: int | None = None
    missing: tuple[str, ...] = ()
    not_reached: tuple[str, ...] = ()
    removed_on: tuple[str, ...] = ()
    bucket: str = ""
    note: str = ""
    is_mendable: bool = False
    content: str = ""
    is_rejected: bool = False

    @property
    def step(self) -> int | None:
        """The number at the end of its id, such as 100 of `step-100`."""
        return find_step(self.checkpoint_id)

    @property
    def is_good(self) -> bool:
        """Whether it needs no action: each shard has its copies, judged by size, or the save is being removed."""
        return self.state in (WHOLE, IN_BUCKET, REMOVED, RETIRED)

    @property
    def is_lost(self) -> bool:
        """Whether no node can have some of its files. This may also hold for a save that is being removed."""
        return self.state == LOST or bool(self.missing and not self.not_reached)

    @property
    def has_few_nodes(self) -> bool:
        """Whether it has fewer copies than wanted only because there are fewer nodes."""
        return self.state == WHOLE and (self.copies_seen or 0) < (self.copies_wanted or 0)

    @property
    def shares_host(self) -> bool:
        """Whether the required copies of some shard are on fewer hosts or domains than their number."""
        return (self.hosts_seen or 0) < min(self.copies_seen or 0, self.copies_wanted or 0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "step": self.step}

    def describe_copies(self, seen: NodesSeen) -> str:
        """The column COPIES: copies seen, copies wanted, and the nodes that may have more but did not answer."""
        return self._describe_copies(seen) + (", rejected" if self.is_rejected else "")

    def _describe_copies(self, seen: NodesSeen) -> str:
        if self.state in (DAMAGED, UNMANAGED):
            return self.note
        if self.state == IN_BUCKET:
            return "no node has it" if seen.holdings_by_node else "no node was asked"
        if self.state in (REMOVED, RETIRED):
            return self._describe_going(seen)
        silent = [node for node in self.not_reached if node in seen.unreached]
        unknown = [node for node in self.not_reached if node not in seen.unreached]
        why = f": {seen.list_names(silent)} not reached" if silent else ""
        if unknown and not silent:
            names = seen.list_names(unknown)
            why = f": this node has no address of {names}" if seen.has_own else f": {names} was not asked"
        if self.state in (NOT_SEEN, LOST, OVERWRITTEN):
            removed = f"; removed on {seen.list_names(self.removed_on)}" if self.removed_on else ""
            what = f"{OVERWRITTEN} by another run" if self.state == OVERWRITTEN else self.state
            return f"{plural(len(self.missing), 'file')} {what}{why}{removed}"
        if self.state == SHORT:
            return f"{self.copies_seen} of {self.copies_wanted} copies seen{why}"
        few = f", as there {'is' if seen.nodes_known == 1 else 'are'} {plural(seen.nodes_known, 'node')}"
        hosts = f", on {plural(self.hosts_seen or 0, 'host')}" if self.shares_host else ""
        return f"{self.copies_seen} of {self.copies_wanted}" + (few + why if self.has_few_nodes else "") + hosts

    def _describe_going(self, seen: NodesSeen) -> str:
        if self.state == REMOVED:
            return f"removed on {seen.list_names(self.removed_on)}, still on other nodes"
        return f"expired, still on {seen.list_names(self.nodes)}"

    def paint(self, copies: str) -> str:
        """The column COPIES in the colour of its state, for a terminal."""
        colour = Colour.GREEN if self.is_good else Colour.YELLOW if self.state in (SHORT, NOT_SEEN) else Colour.RED
        return paint(copies, Colour.YELLOW if self.is_good and self.shares_host else colour)

    def cells(self, seen: NodesSeen) -> tuple[str, ...]:
        """Its row of the table."""
        hosts = sorted(seen.name(node) for node in self.nodes if node != OBJECT_NODE)
        return (
            self.checkpoint_id,
            format_moment(self.saved_unix_s),
            "-" if self.step is None else str(self.step),
            self.content or "-",
            "-" if self.size_bytes is None else describe_bytes(self.size_bytes),
            self.describe_copies(seen),
            list_some(hosts, _HOSTS_MAX) or "-",
            self.bucket or "-",
        )


def format_checkpoints(rows: Sequence[CheckpointSeen], seen: NodesSeen) -> str:
    """The table of `ls`."""
    cells = [row.cells(seen) for row in rows]
    header, *lines = format_table(HEADER, cells).split("\n")
    place = HEADER.index("COPIES")
    # Painted after the alignment, because escapes would count as width. Ids, which come first, have no spaces to match.
    painted = [
        line.replace(texts[place], row.paint(texts[place]), 1)
        for line, texts, row in zip(lines, cells, rows, strict=True)
    ]
    return "\n".join([header, *painted])


def list_checkpoints(seen: NodesSeen, there: Sequence[BucketSave] | None = None) -> list[CheckpointSeen]:
    """Every managed checkpoint, newest first, and each directory whose manifest is damaged on all nodes.

    `there`: the committed saves in the bucket. None: no bucket was listed.
    """
    holdings = seen.holdings + [save.holding for save in there or ()]
    found = saves_found(holdings)
    in_bucket = None if there is None else {(save.checkpoint_id, save.save_id) for save in there}
    # A rejection in the bucket counts unless a node has a newer mark, which ended it.
    marks = merge_marks([seen.marks, Marks({save.save_id: 1 for save in there or () if save.is_rejected})])
    rows = [_see(save, seen, in_bucket, is_rejected=marks.is_rejected(save.save_id)) for save in found]
    return [*rows, *_list_damaged(seen, {row.checkpoint_id for row in rows})]


def _see(
    save: SaveFound, seen: NodesSeen, in_bucket: set[tuple[str, str]] | None, *, is_rejected: bool
) -> CheckpointSeen:
    manifest = seen.manifests.get(save.save_id)
    version, nodes = save.version, tuple(holding.node_id for holding in save.holdings)
    row = CheckpointSeen(
        save.checkpoint_id,
        IN_BUCKET if set(nodes) == {OBJECT_NODE} else DAMAGED,
        nodes,
        save.save_id,
        save.sequence,
        version.lineage,
        version.order[1],
        note="no node returned its manifest",
        bucket=_bucket_state(save, manifest, seen, in_bucket),
        is_rejected=is_rejected,
    )
    # Files in the bucket do not count as copies on a node.
    on_nodes = tuple(holding for holding in save.holdings if holding.node_id != OBJECT_NODE)
    is_slim = any(holding.is_slim for holding in on_nodes or save.holdings)
    row = replace(row, content=WEIGHTS if is_slim else FULL)
    if manifest is None or not on_nodes:
        largest = {name: size for holding in save.holdings for name, size in holding.sizes.items()}
        return replace(row, size_bytes=sum(largest.values()))
    size = manifest.metadata_bytes + sum(manifest.shard_sizes.values())
    counted = see_with_unclaimed_files(replace(save, holdings=on_nodes), manifest, seen)
    return _count_copies(replace(row, size_bytes=size, note=""), counted, seen)


def see_with_unclaimed_files(save: SaveFound, manifest: Manifest, seen: NodesSeen) -> SeenSave:
    """The save as seen on the nodes, including nodes whose manifest of it is damaged or missing."""
    of_it = [one for one in seen.unclaimed if one.checkpoint_id == save.checkpoint_id and recognize(one, [manifest])]
    more = [one.holding(manifest) for one in of_it if one.matching(manifest)]
    members = {node for entry in manifest.shards.values() for node in entry.holders}
    completed = replace(save, holdings=(*save.holdings, *more))
    # Includes nodes that were not asked, because this node has no address of them.
    silent = members - seen.holdings_by_node.keys() - seen.forgotten
    return see_save(completed, manifest, seen.holdings_by_node.keys(), silent, {holding.node_id for holding in more})


def _count_copies(row: CheckpointSeen, save: SeenSave, seen: NodesSeen) -> CheckpointSeen:
    counts = {shard: len(nodes) for shard, nodes in save.intact.items()}
    missing = [shard for shard, number in sorted(counts.items()) if number == 0]
    missing += [] if save.with_metadata else [METADATA_NAME]
    least = 0 if missing else min(counts.values(), default=len(save.with_metadata))
    hosts = min((len({seen.domain(node) for node in nodes}) for nodes in save.intact.values()), default=None)
    # Each save has its own number: the job may have changed `copies` since.
    wanted = save.manifest.copies
    short = {*missing, *(shard for shard, number in counts.items() if number < wanted)}
    assumed: dict[str, Collection[str]] = {**save.assumed, METADATA_NAME: save.assumed_metadata}
    silent = {node for name in short for node in assumed[name]}
    meant = {node for name in short & save.manifest.shards.keys() for node in save.manifest.shards[name].holders}
    if missing or meant & seen.forgotten:  # any silent node may have received a copy since the save
        silent |= seen.unreached.keys()
    may_be_there = all(assumed[name] or seen.unreached for name in missing)
    state = WHOLE if least >= min(wanted, seen.nodes_known) else SHORT if least else NOT_SEEN if may_be_there else LOST
    # Files that another run's save has replaced are not an accident, and no node can bring them back.
    taken = seen.taken_on(row.checkpoint_id, row.lineage) if state == LOST else ()
    if state == LOST and all(save.is_overwritten(name, taken) for name in missing):
        state = OVERWRITTEN
    nodes = tuple(sorted(node for node in save.holders if node in seen.holdings_by_node))
    removed_on = seen.removed_on(row.checkpoint_id, row.save_id)
    is_going = bool(removed_on) and all(is_removed_everywhere(save.manifest, name, removed_on) for name in missing)
    if state != WHOLE and row.save_id in seen.retired:
        state = RETIRED
    return replace(
        row,
        removed_on=removed_on,
        state=REMOVED if is_going else state,
        nodes=nodes,
        copies_wanted=wanted,
        copies_seen=least,
        hosts_seen=hosts,
        missing=tuple(missing),
        not_reached=tuple(sorted(silent)),
        is_mendable=bool(missing and save.with_metadata) and all(map(save.can_give, counts.keys() & {*missing})),
    )


def _bucket_state(
    save: SaveFound, manifest: Manifest | None, seen: NodesSeen, in_bucket: set[tuple[str, str]] | None
) -> str:
    if in_bucket is not None:
        is_there = (save.checkpoint_id, save.save_id) in in_bucket
        return "there" if is_there else "" if manifest is None or manifest.upload is None else "not there"
    node_reports = [held.node_report for held in seen.holdings_by_node.values()]
    if save.save_id in pending(node_reports):
        is_refused = any(save.save_id in node_report.unable for node_report in node_reports)
        return "refused" if is_refused else "on its way"
    if any(save.save_id in node_report.absent for node_report in node_reports):
        return "not there"
    if any(save.save_id in node_report.uploaded for node_report in node_reports):
        return "there"
    return "" if manifest is None or manifest.upload is None else "unknown"


def _list_damaged(seen: NodesSeen, listed: set[str]) -> Iterator[CheckpointSeen]:
    """Directories with files of this package for which no node that answered has a valid manifest."""
    by_id: dict[str, list[tuple[str, int]]] = {}
    for one in seen.unclaimed:
        if one.is_ours and one.checkpoint_id not in listed:
            by_id.setdefault(one.checkpoint_id, []).append((one.node_id, sum(one.sizes.values())))
    for checkpoint_id, found in sorted(by_id.items()):
        nodes = tuple(node for node, _ in found)
        yield CheckpointSeen(checkpoint_id, DAMAGED, nodes, size_bytes=sum(s for _, s in found), note=DAMAGED)


def list_unmanaged(store: LocalStore, seen: NodesSeen, without: Iterable[str]) -> list[CheckpointSeen]:
    """A row of `ls` for each checkpoint of FileSystemWriter on the nodes. `without`: ids that have a row already."""
    look = UnmanagedLook(store, seen.own_node, seen.reached)
    return [_see_unmanaged(look, checkpoint) for checkpoint in look.checkpoints(None, without)]


def _see_unmanaged(look: UnmanagedLook, checkpoint: UnmanagedCheckpoint) -> CheckpointSeen:
    nodes = tuple(holding.node_id for holding in checkpoint.holdings)
    note, missing = _unmanaged_state(look, checkpoint)
    return CheckpointSeen(checkpoint.checkpoint_id, UNMANAGED, nodes, missing=missing, note=note)


def _unmanaged_state(look: UnmanagedLook, checkpoint: UnmanagedCheckpoint) -> tuple[str, tuple[str, ...]]:
    """The state of the checkpoint, and its missing files. Without a valid `.metadata` the shards are unknown."""
    if not checkpoint.nodes_with_metadata:
        return "stock, no .metadata", (METADATA_NAME,)
    try:
        save = look.examine(checkpoint).save
    except CheckpointAmbiguous:
        return "stock, contradictory", (METADATA_NAME,)
    except (MetadataUnsafe, StoreError, PeerProtocolError):
        return "stock, unreadable", (METADATA_NAME,)
    note = f"stock, {plural(len(save.missing), 'shard')} missing" if save.missing else "stock, unprotected"
    return note, tuple(save.missing)


def describe_totals(
    rows: Sequence[CheckpointSeen], seen: NodesSeen, bad: Sequence[CheckpointSeen] | None = None
) -> str:
    """The line below the table: the totals, and the problems of the rows in `bad`, else of all rows."""
    size = describe_bytes(sum(row.size_bytes or 0 for row in rows))
    nodes = (
        f"{len(seen.holdings_by_node)} of {plural(len(seen.holdings_by_node) + len(seen.unreached), 'node')} answered"
    )
    judged = rows if bad is None else bad
    by_state: Mapping[str, int] = {state: sum(row.state == state for row in judged) for state in _NOT_GOOD}
    wrong = [f"{number} {words}" for state, number in by_state.items() if number and (words := _NOT_GOOD[state])]
    if shared := sum(row.shares_host for row in rows):
        wrong.append(f"{shared} with copies of one shard on one host")
    return f"{plural(len(rows), 'checkpoint')}, {size} in one copy of each; {nodes}" + "".join(
        f"; {one}" for one in wrong
    )


def without_superseded(rows: Sequence[CheckpointSeen]) -> list[CheckpointSeen]:
    """All rows, without older versions that a newer, complete save of the same run has replaced."""
    # An older version loses files while it is removed, which is not a fault.
    whole: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.state == WHOLE:
            key = row.checkpoint_id, row.lineage
            whole[key] = max(row.sequence, whole.get(key, -1))
    return [row for row in rows if row.sequence >= whole.get((row.checkpoint_id, row.lineage), -1)]


def find_needed(rows: Sequence[CheckpointSeen], seen: NodesSeen) -> set[str]:
    """The nodes that did not answer and may have a missing file of a checkpoint."""
    missed = set[str]()
    for row in without_superseded(rows):
        if not row.is_good:
            missed.update(seen.unreached if row.state == DAMAGED else row.not_reached)
    return missed & seen.unreached.keys()


def advise(rows: Sequence[CheckpointSeen], seen: NodesSeen, root: Path) -> list[str]:
    """As `advise_on_missing`, and a note for each other node that did not answer."""
    spare = seen.unreached.keys() - find_needed(rows, seen)
    return [*advise_on_missing(rows, seen, root), *describe_spare(seen, root, spare)]


def advise_on_missing(rows: Sequence[CheckpointSeen], seen: NodesSeen, root: Path) -> list[str]:
    """The next step for each checkpoint that the nodes that answered cannot repair, and for the nodes that it needs."""
    by_id = Counter(row.checkpoint_id for row in rows)
    damaged = [_advise_on_damaged(row, seen, root) for row in rows if row.state == DAMAGED]
    wanted = without_superseded(rows)
    lost = [_advise_on_lost(row, by_id[row.checkpoint_id] > 1, seen, root) for row in wanted if row.state == LOST]
    short = [row for row in wanted if row.state in (SHORT, NOT_SEEN)]
    silent = {node for row in short for node in row.not_reached}
    needed = find_needed(rows, seen)
    copies_wanted = max((row.copies_wanted or 0 for row in short), default=0)
    return [
        *damaged,
        *lost,
        *advise_on_unknown_nodes(silent, seen),
        *advise_on_silence(seen, needed, root),
        *advise_on_lost(seen, root, needed, copies_wanted, is_unseen=any(row.missing for row in short)),
        *advise_on_bucket(wanted, seen),
    ]


def advise_on_bucket(rows: Sequence[CheckpointSeen], seen: NodesSeen) -> list[str]:
    """The next step for checkpoints with files that only silent nodes may have, if the bucket has the checkpoints."""
    by_url: dict[str, list[str]] = {}
    for row in rows:
        if row.state == NOT_SEEN and row.bucket == "there":
            by_url.setdefault(_find_url(row, seen), []).append(row.checkpoint_id)
    return [
        f"next step for {list_some(names, _NAMED_MAX)}: load with object_store={url!r}, which has all files"
        for url, names in by_url.items()
    ]


def list_urls(row: CheckpointSeen, seen: NodesSeen, target: ObjectTarget | None) -> list[str]:
    """The bucket that the save names, and the one that the user names."""
    manifest = seen.manifests.get(row.save_id)
    upload = None if manifest is None else manifest.upload
    return sorted({*([] if upload is None else [upload.url]), *([] if target is None else [target.url])})


def _find_url(row: CheckpointSeen, seen: NodesSeen) -> str:
    manifest = seen.manifests.get(row.save_id)
    return "its bucket" if manifest is None or manifest.upload is None else manifest.upload.url


def _advise_on_damaged(row: CheckpointSeen, seen: NodesSeen, root: Path) -> str:
    # A peer may have chosen the name, so it is quoted for a shell.
    return (
        f"next step for {row.checkpoint_id}: start the agent of another node that has it, then `replicated-ckpt "
        f"repair --root {quote(str(root))}`. If no node has it, its data may still load without the manifest: see "
        f"the runbook, ManifestInvalid. If you do not need its files: `rm -r {quote(row.checkpoint_id)}` in the "
        f"root of {seen.list_names(row.nodes)}"
    )


def _advise_on_lost(row: CheckpointSeen, has_other_version: bool, seen: NodesSeen, root: Path) -> str:
    where, may_be_in_bucket = f"--root {quote(str(root))}", row.bucket in ("there", "unknown")
    options = f" --save {row.save_id}" if has_other_version else ""
    options += " --keep-in-bucket" if may_be_in_bucket else ""
    remove = f"replicated-ckpt rm {quote(row.checkpoint_id)} {where}{options}"
    left = set(row.nodes) - set(row.removed_on)
    is_partly_removed = seen.own_node in row.removed_on and bool(left)
    steps = [
        *([f"`replicated-ckpt repair {where}`, which combines the intact blocks of damaged copies"] * row.is_mendable),
        *([f"load it with object_store={_find_url(row, seen)!r}"] * may_be_in_bucket),
        'load an older checkpoint, as "latest" does',
        "bring back a disk that has the lost files",
        f"remove the rest of it on {seen.list_names(left)}: {on_each_host(seen, left, remove)}"
        if is_partly_removed
        else f"remove it: `{remove}`",
    ]
    other = ". Another version also has this name" if has_other_version else ""
    return f"next step for {row.checkpoint_id}: {'; or '.join(steps)}{other}"


def describe_damaged_manifests(rows: Sequence[CheckpointSeen], seen: NodesSeen) -> list[str]:
    """A line for each damaged manifest of a checkpoint that has good ones: it takes no copy away, so no row shows it."""
    listed = {row.checkpoint_id for row in rows if row.save_id}
    return [
        f"{seen.label(one.node_id)}: its manifest of {one.checkpoint_id} is damaged; `repair` restores it"
        for one in seen.unclaimed
        if one.is_ours and one.checkpoint_id in listed
    ]


_NOT_GOOD = {
    SHORT: "with fewer copies than wanted",
    NOT_SEEN: "with files that no node returned",
    LOST: "with lost files",
    OVERWRITTEN: "overwritten by another run",
    DAMAGED: "with a damaged manifest",
    UNMANAGED: "of stock torch",
}


def describe_newer(checkpoint_id: str) -> str:
    """The line for a checkpoint of a newer format, of which this version reads only the name."""
    return f"{checkpoint_id}: only a newer version of replicated_ckpt reads it; upgrade"


def describe_absent(store: LocalStore, seen: NodesSeen, checkpoint_id: str, otherwise: str = "") -> ReplicatedCkptError:
    """The error for a checkpoint that was not found. `otherwise` is appended to its hint."""
    # "Not found" would suggest that the checkpoint is gone.
    if checkpoint_id in seen.newer:
        return ManifestVersionUnknown(
            f"{checkpoint_id!r} has a format that only a newer version of replicated_ckpt reads."
        )
    look = UnmanagedLook(store, seen.own_node, seen.reached)
    if is_checkpoint_id(checkpoint_id) and look.checkpoints(checkpoint_id):
        return CheckpointNotFound(
            f"{checkpoint_id!r} is a checkpoint of stock torch, which has no manifest.",
            "It is a plain directory on each node that has files of it. Load it and save it under a new id: the new "
            "save has copies and checksums.",
        )
    if Newest.parse(checkpoint_id) and (newest := choose_id(checkpoint_id, list_checkpoints(seen))):
        message = f"The command takes the id of a checkpoint, not {checkpoint_id!r}."
        return ConfigInvalid(message, f"The newest one that can be loaded is {newest!r}.")
    listing = f"`replicated-ckpt ls --root {quote(str(store.root))}`" if seen.has_own else "`ls` with the same --nodes"
    hint = f"{listing} lists the checkpoints, and the nodes that were not reached.{otherwise}"
    unreached = seen.describe_unreached()
    where = f" Not reached: {'; '.join(unreached)}." if unreached else ""
    message = f"No node that was reached holds a checkpoint {checkpoint_id!r}.{where}"
    return CheckpointNotFound(message, hint, unreached)


def find_id(store: LocalStore, asked: str, seen: NodesSeen | None = None, peers: PeerBook | None = None) -> str:
    """The id for `asked`. For "latest": the newest checkpoint that can be loaded from the nodes that answered.

    Raises:
        LatestAmbiguous: checkpoints lie in several directories. CheckpointNotFound: none was seen.
    """
    if Newest.parse(asked) is None:
        return asked
    seen = look_at_nodes(store, peers) if seen is None else seen
    found = choose_id(asked, list_checkpoints(seen))
    if found is None:
        raise describe_absent(store, seen, asked)
    return found


def choose_id(asked: str, rows: Sequence[CheckpointSeen]) -> str | None:
    """The id for `asked`, as `find_id`, in the order of the rows; None: there is no checkpoint for "latest".

    Raises:
        LatestAmbiguous: checkpoints lie in several directories.
    """
    newest = Newest.parse(asked)
    if newest is None:
        return asked
    newest = newest.choose_directory(row.checkpoint_id for row in rows)
    fitting = [row for row in rows if newest.fits(row.checkpoint_id)]
    # The newest may be damaged or rejected, and a load of "latest" would skip it.
    whole = (row for row in fitting if not (row.is_lost or row.is_rejected) and row.state != DAMAGED)
    chosen = next(whole, next(iter(fitting), None))
    return None if chosen is None else chosen.checkpoint_id
