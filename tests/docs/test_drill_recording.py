"""The README's recording matches the drill's output, and the tool draws what a command printed, and when."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from replicated_ckpt.drill.table import HEADER
from tests.docs.test_docs import text_of
from tools.drill_recording import (
    FIRST_FRAME_S,
    IDLE_MAX_S,
    LAST_FRAME_S,
    Cast,
    draw,
    lines_of,
    read_cast,
    record,
    write_cast,
)

SVG = "{http://www.w3.org/2000/svg}"


def drawn_lines(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_readme_shows_the_drill_as_it_prints_now() -> None:
    """The recording has the drill's columns, the scenario held, and the image loads nothing from other hosts."""
    assert "](docs/drill.svg)" in text_of("README.md")
    svg = text_of("docs/drill.svg")
    lines = drawn_lines(svg)
    (header,) = (number for number, line in enumerate(lines) if line.startswith("scenario "))
    assert tuple(re.split(r"\s{2,}", lines[header])) == HEADER
    assert re.search(r"  held: same bits$", lines[header + 2])
    assert "<script" not in svg
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]


def test_the_output_of_a_command_is_recorded_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both streams are recorded in order and drawn from the file. The exit code is the command's."""
    program = "import os, sys; print('a < b', flush=True); print('\\x1b[31mred\\x1b[0m', file=sys.stderr); sys.exit(3)"
    cast, code = record([sys.executable, "-c", program])
    write_cast(cast, tmp_path / "some.cast")
    assert (code, "a < b" in capsys.readouterr().out) == (3, True)
    command, *lines = drawn_lines(draw(read_cast(tmp_path / "some.cast")))
    assert command.startswith("$ ")
    assert lines == ["a < b", "red"]


def test_pauses_are_cut_and_half_lines_wait_for_their_end() -> None:
    """Long pauses are shortened, and a line appears once it is complete. The recording pauses after the last line, and
    repeats.
    """
    cast = Cast("x", [(0.5, "one\r\ntw"), (60.5, "o\r\n\r\n"), (60.7, "end")])
    seconds, lines = zip(*lines_of(cast), strict=True)
    first = FIRST_FRAME_S + 0.5
    assert lines == ("one", "two", "", "end")
    assert seconds == pytest.approx((first, first + IDLE_MAX_S, first + IDLE_MAX_S, first + IDLE_MAX_S + 0.2))
    assert f" {seconds[-1] + LAST_FRAME_S:.1f}s step-end infinite" in draw(cast)
