"""Results as plain text: a table for each suite, setup and kind of work."""

from collections.abc import Iterator, Sequence

from benchmarks.suites.results import Results, Row, distinct

HEADER = ("s", "x base", "limit s", "limit/s", "done s", "CPU s/GB", "+ agents", "MB more", "agents", "runs")
TITLES = {
    "save": "An FSDP2 model under AdamW",
    "load": "Loads by a world that has just begun",
    "small": "Many small tensors",
    "repeat": "The third save and later ones with keep_last=1",
    "repeat small": "The same with many small tensors",
    "parts fsdp2": "A file for each part of a checkpoint, of a model under AdamW",
    "parts frozen": "A model of which 95 % do not change",
    "parts small adamw": "A file for each part of a checkpoint, of many small tensors",
    "replicas ddp": "A DDP model under AdamW, of which every rank has a replica",
    "replicas hsdp": "An HSDP model under AdamW, of which every node, or every second one, has a replica",
    "growth": "How cost grows",
    "emulated": "Nodes with links and disks of a set speed",
    "bucket": "Buckets",
    "peers": "Others",
    "stall": "Training that saves",
}
WORKS = {
    "save": "save",
    "load": "load",
    "recover": "recover",
    "block": "standstill for each save",
    "p50": "median step",
    "p99": "slowest step of 100",
    "lap": "a lap of another thread",
}
Cells = tuple[str, ...]


def printed(results: Results) -> str:
    """All tables, then what was skipped or failed."""
    machine = results.machine
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    for title, rows, probes in sections(results):
        lines += [title, *_aligned([("", *HEADER), *(cells(results, row) for row in rows)])]
        lines += [*([probes] if probes else []), ""]
    lines += [f"skipped: {text}" for text in results.skipped]
    return "\n".join([*lines, *(f"FAILED: {suite}" for suite in results.failed)])


def sections(results: Results) -> Iterator[tuple[str, list[Row], str]]:
    """For each table: its title, rows, and the speeds of the machine alone."""
    for suite in distinct(row.suite for row in results.rows):
        rows = results.of(suite)
        for setup in distinct(row.setup for row in rows):
            here = [row for row in rows if row.setup == setup]
            for work, shown_as in WORKS.items():
                shown = [row for row in here if row.work == work]
                if shown:
                    size = f", {shown[0].state_bytes / 1e6:.0f} MB" if shown[0].x is None else ""
                    title = f"{TITLES[suite]}: {shown_as}, {setup}{size}"
                    yield title, shown, _probes(here) if shown[0].x is None else ""


def cells(results: Results, row: Row) -> Cells:
    name = row.case if row.x is None else f"{row.case}, {row.x:.4g}"
    if not row.samples:
        return (name, row.note, *[""] * (len(HEADER) - 1))
    note = f" ({row.note})" if row.note else ""
    return (
        name + note,
        f"{row.seconds:.3f}",
        _or_dash(results.ratio(row), 2),
        _or_dash(row.limit_s, 3),
        _or_dash(row.efficiency, 2),
        f"{row.settled_s:.3f}",
        f"{row.cpu_s_per_gb('rank'):.2f}",
        f"{row.cpu_s_per_gb('agent'):.2f}",
        f"{row.peak_bytes('rank') / 1e6:.0f}",
        f"{row.peak_bytes('agent') / 1e6:.0f}",
        str(len(row.samples)),
    )


def _probes(rows: Sequence[Row]) -> str:
    found = list({row.case: row for row in rows if row.work == "probe"}.values())  # of one world
    speeds = [f"{row.case} {row.state_bytes / row.seconds / 1e9:.2f}" for row in found]
    return f"The machine alone, all ranks at once, GB/s: {', '.join(speeds)}." if speeds else ""


def _or_dash(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _aligned(rows: Sequence[Cells]) -> list[str]:
    """Aligns numbers to the right. A row with only a note does not widen its column."""
    full = [row for row in rows if row[-1]]
    widths = [max(len(row[column]) for row in full or rows) for column in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    return ["  ".join([row[0].ljust(widths[0]), *_right(row[1:], widths[1:])]).rstrip() for row in rows]


def _right(texts: Cells, widths: Sequence[int]) -> list[str]:
    return [text.rjust(width) for text, width in zip(texts, widths, strict=True)]
