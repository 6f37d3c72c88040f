"""The system calls of a scenario as strace sees them, for comparison with its recorder.

`python -m tests.fault.power_loss.strace NAME BASE` runs one scenario and prints the recorder's calls.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from replicated_ckpt.stores.local.store import LocalStore
from tests.fault.power_loss.scenarios import SCENARIOS, Marker, nothing, recorded

HOME = Path(__file__).resolve().parents[3]
_CHANGING = (
    "open,openat,openat2,creat,write,pwrite64,writev,pwritev,pwritev2,truncate,ftruncate,fallocate,fsync,fdatasync,"
    "sync_file_range,syncfs,sync,msync,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir,symlink,"
    "symlinkat,mknod,mknodat,copy_file_range,sendfile,splice"
)
_LINE = re.compile(r"(?:\d+ +)?(?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>\d+)")
_PLACE = re.compile(r'(?:(?:AT_FDCWD|\d+)<(?P<directory>[^>]*)>, )?"(?P<name>(?:[^"\\]|\\.)*)"')
_OF_FD = re.compile(r"\d+<(?P<path>[^>]*)>")
_KINDS = {"renameat": "rename", "linkat": "link", "mkdirat": "mkdir", "pwrite64": "write", "writev": "write"}
_KINDS["ftruncate"] = "truncate"
_BY_FD = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync"}
_BY_FD |= {"sync_file_range", "syncfs", "copy_file_range", "sendfile", "splice"}

Call = tuple[str, ...]


def traced(name: str, base: Path, log: Path) -> tuple[list[Call], list[Call]]:
    """Runs a scenario in a process of its own. Returns the calls that strace saw below `base`, and those that were
    recorded.
    """
    command = ["strace", "-f", "-y", "-s", "0", "-e", f"trace={_CHANGING}", "-e", "signal=none", "-o", str(log)]
    command += [sys.executable, "-m", __name__, name, str(base)]
    environment = {**os.environ, "PYTHONPATH": str(HOME), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd=HOME, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    noted = [tuple(call) for call in json.loads(done.stdout)]
    return list(seen_below(base, log.read_text())), noted


def seen_below(base: Path, text: str) -> Iterator[Call]:
    """The successful calls of a trace that changed or synced something below `base`, in the recorder's form.

    Threads take turns at the recorder's lock. So if strace reports a call in two pieces, no other call of interest is
    between them.
    """
    unfinished: dict[str, str] = {}
    for line in text.splitlines():
        pid = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            unfinished[pid] = line.removesuffix("<unfinished ...>")
            continue
        resumed = re.match(r"\d+ +<\.\.\. \w+ resumed>(.*)", line)
        match = _LINE.match(unfinished.pop(pid) + resumed[1] if resumed else line)
        if match is not None:
            yield from _as_noted(base, match["call"], match["arguments"], match["result"])


def _as_noted(base: Path, call: str, arguments: str, result: str) -> Iterator[Call]:
    if call in {"open", "openat", "creat"}:
        places = _places(base, arguments) if re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC)", arguments) else []
        kind, details = "open", []
    elif call in _BY_FD:
        place = _OF_FD.match(arguments)
        places = [_relative(base, place["path"])] if place is not None else []
        kind, details = _KINDS.get(call, call), [result] if "write" in call else []
        if call == "ftruncate":
            details = [arguments.rpartition(", ")[2]]
    else:
        places, kind, details = _places(base, arguments), _KINDS.get(call, call), []
        if call == "renameat2":
            kind = "exchange" if "RENAME_EXCHANGE" in arguments else "rename"
        elif call == "truncate":
            details = [arguments.rpartition(", ")[2]]
        elif call == "unlinkat":
            kind = "rmdir" if "AT_REMOVEDIR" in arguments else "unlink"
    found = [place for place in places if place is not None]
    if found:
        yield (kind, *found, *details)


def _places(base: Path, arguments: str) -> list[str | None]:
    return [
        _relative(base, os.path.normpath(Path(match["directory"] or "/", match["name"])))
        for match in _PLACE.finditer(arguments)
    ]


def _relative(base: Path, path: str) -> str | None:
    place = Path(path)
    if place == base:
        return ""
    return place.relative_to(base).as_posix() if base in place.parents else None


def noted_calls(name: str, base: Path) -> list[Call]:
    """The recorded calls of a scenario, its preparation included."""
    scenario = SCENARIOS[name]

    def run(store: LocalStore, mark: Marker) -> None:
        scenario.prepare(store)
        scenario.run(store, mark)

    return recorded(replace(scenario, prepare=nothing, run=run), base).calls


if __name__ == "__main__":
    sys.stdout.write(json.dumps(noted_calls(sys.argv[1], Path(sys.argv[2]))))
