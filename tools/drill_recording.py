"""Records a command in a terminal, and draws the recording as an animated SVG. The README shows a recording of the drill.

python tools/drill_recording.py record drill.cast replicated-ckpt drill --scenario replace --ranks-per-node 2
python tools/drill_recording.py draw drill.cast docs/drill.svg

The recording is an asciicast (version 2), which asciinema can play. Only whole lines are drawn, without colours, so
programs that move the cursor need another tool. A viewer without CSS animations shows the last frame.
"""

import argparse
import codecs
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS, ROWS = 120, 40
IDLE_MAX_S = 1.0
FIRST_FRAME_S, LAST_FRAME_S = 0.7, 7.0
CELL, LINE, PADDING, BAR = 7.2, 18, 16, 28
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


@dataclass(frozen=True, slots=True)
class Cast:
    """A command and its output as (seconds since its start, text)."""

    command: str
    events: Sequence[tuple[float, str]]


def record(command: Sequence[str]) -> tuple[Cast, int]:
    """Runs the command in its own terminal. Returns the recording and the exit code."""
    terminal, end_of_command = pty.openpty()
    ioctl(end_of_command, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    started, events = time.monotonic(), []
    process = subprocess.Popen(
        command, stdin=end_of_command, stdout=end_of_command, stderr=end_of_command, start_new_session=True
    )
    os.close(end_of_command)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while output := _read(terminal):
        text = decoder.decode(output)
        events.append((time.monotonic() - started, text))
        sys.stdout.write(text)
        sys.stdout.flush()
    os.close(terminal)
    return Cast(shlex.join(command), events), process.wait()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux returns EIO after the last process has closed the terminal
        return b""


def write_cast(cast: Cast, file: Path) -> None:
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "command": cast.command}
    lines = [header, *([round(seconds, 3), "o", text] for seconds, text in cast.events)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def read_cast(file: Path) -> Cast:
    header, *events = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return Cast(header["command"], [(seconds, text) for seconds, kind, text in events if kind == "o"])


def lines_of(cast: Cast) -> Iterator[tuple[float, str]]:
    """Each line with the time of its completion. Pauses are cut to IDLE_MAX_S."""
    now, last, rest = FIRST_FRAME_S, 0.0, ""
    for seconds, text in cast.events:
        now, last = now + min(seconds - last, IDLE_MAX_S), seconds
        *whole, rest = (rest + _ESCAPES.sub("", text)).replace("\r\n", "\n").split("\n")
        yield from ((now, line.rstrip()) for line in whole)
    if rest:
        yield now, rest


def draw(cast: Cast) -> str:
    """The recording as SVG: each line appears at the time when it was printed, in a loop."""
    lines = [(0.0, f"$ {cast.command}"), *lines_of(cast)]
    end = lines[-1][0] + LAST_FRAME_S
    width = 2 * PADDING + CELL * max(len(line) for _, line in lines)
    height = BAR + LINE * len(lines) + PADDING
    times = sorted({seconds for seconds, line in lines if line and seconds > 0})
    rules = [_appear(index, seconds / end * 100, end) for index, seconds in enumerate(times)]
    texts = [
        _line(line, BAR + LINE * (row + 1) - 5, f"t{times.index(seconds)}" if seconds > 0 else "c")
        for row, (seconds, line) in enumerate(lines)
        if line
    ]
    return "\n".join([*_window(cast.command, round(width), height, rules), *texts, "</svg>", ""])


def _appear(index: int, percent: float, end: float) -> str:
    frames = f"@keyframes t{index}{{0%{{opacity:0}}{percent:.2f}%,100%{{opacity:1}}}}"
    return f"{frames}.t{index}{{animation:t{index} {end:.1f}s step-end infinite}}"


def _line(text: str, y: int, kind: str) -> str:
    """The text has an explicit length, so that columns align in any font."""
    length = f'textLength="{CELL * len(text):.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text class="{kind}" x="{PADDING}" y="{y}" {length} xml:space="preserve">{escape(text)}</text>'


def _window(title: str, width: int, height: int, rules: Sequence[str]) -> Iterator[str]:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}" font-size="12">'
    yield f"<title>Recording of a terminal: {escape(title)}</title>"
    yield f"<style>text{{fill:#c9d1d9;white-space:pre}}.c{{fill:#7ee787}}{''.join(rules)}"
    yield "@media (prefers-reduced-motion:reduce){text{animation:none!important}}</style>"
    yield f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="#0d1117" stroke="#6e7681"/>'
    yield from (f'<circle cx="{PADDING + 4 + 16 * index}" cy="15" r="5" fill="#484f58"/>' for index in range(3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run a command and write what it prints, with its times")
    recording.add_argument("cast", type=Path)
    recording.add_argument("command", nargs=argparse.REMAINDER)
    drawing = verbs.add_parser("draw", help="draw a recording as an animated SVG")
    drawing.add_argument("cast", type=Path)
    drawing.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "draw":
        arguments.svg.write_text(draw(read_cast(arguments.cast)), encoding="utf-8")
        return 0
    cast, code = record(arguments.command)
    write_cast(cast, arguments.cast)
    return code


if __name__ == "__main__":
    sys.exit(main())
