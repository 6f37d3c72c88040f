"""The suite of peers: each tool, stock torch, and ours with as many copies, on the same state in the same world."""

import sys
from collections.abc import Sequence

from benchmarks.options import Options
from benchmarks.peers.peer import PEERS, Peer
from benchmarks.rank import comparison
from benchmarks.suites.limits import limits_of
from benchmarks.suites.results import Row
from benchmarks.suites.saving import STOCK, Case, our_case, stock_case
from benchmarks.suites.setup import Setup, cluster_on
from tests.harness.cluster import call

SHARE = 0.1  # share of the time of all suites
_SIZE_BYTES_MAX = 256 << 20
_GRACE_S = 120.0


def peers_suite(options: Options) -> list[Row]:
    """On tmpfs, where fsync costs nothing, because some peers do not fsync."""
    rows: list[Row] = []
    for peer in PEERS:
        if peer.version is None:
            rows.append(_without(peer, f"{peer.distribution} is not installed"))
            continue
        try:
            rows += _compare(options, peer, options.seconds * SHARE / len(PEERS))
        except AssertionError as exc:  # a rank failed; the benchmark continues without the peer
            print(f"{peer.way}: {str(exc)[-2000:]}", file=sys.stderr)
            rows.append(_without(peer, f"{peer.distribution} {peer.version} failed here"))
    return rows


def _without(peer: Peer, why: str) -> Row:
    return Row("peers", f"{peer.way}: {peer.promise}", "save", peer.way, STOCK, 0, note=why)


def _compare(options: Options, peer: Peer, seconds: float) -> list[Row]:
    setup, size_bytes = Setup("tmpfs", 2, 2), min(options.size_bytes, _SIZE_BYTES_MAX)
    ours = [our_case(peer.copies, ack) for ack in peer.acks]
    losing = [{**case, "way": "ours that lose a node"} for case in ours] if peer.recovers else ours
    theirs = {"name": f"{peer.way} {peer.version}", "way": peer.way, "options": {}, "copies": peer.copies}
    cases = [{**stock_case(), "loses": False}, *({**case, "loses": peer.recovers} for case in (*losing, theirs))]
    with cluster_on(options, setup, size_bytes * 6) as cluster:
        step = call(
            comparison.compare,
            size_bytes=size_bytes,
            cases=cases,
            rounds=options.rounds,
            deadline_s=seconds,
        )
        results = cluster.run(step, nodes=range(2), ranks=2, timeout_s=seconds + _GRACE_S)
    taken = results[0]
    assert taken is not None
    return _rows(peer, cases, taken)


def _rows(peer: Peer, cases: Sequence[Case], taken: dict[str, dict[str, list[dict[str, float]]]]) -> list[Row]:
    limits, title, rows = limits_of(taken["probe"]), f"{peer.way}: {peer.promise}", []
    size = int(taken["state_bytes"])  # type: ignore[call-overload]  # the only entry that is a number
    for case in cases:
        limit_by_work = {"save": limits.save_s(case["copies"]), "load": limits.load_s(), "recover": limits.load_s(0.5)}
        for work, limit_s in limit_by_work.items():
            if samples := taken[work].get(case["name"]):
                base = STOCK if work != "recover" else our_case(peer.copies, peer.acks[0])["name"]
                rows.append(Row("peers", title, work, case["name"], base, size, samples, limit_s))  # type: ignore[arg-type]
    return rows
