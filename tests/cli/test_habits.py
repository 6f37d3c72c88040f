"""What every verb has in common: how its store and its output are chosen, and how a shell completes it."""

import argparse
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import VERBS, parser
from tests.agent.agents import HOME
from tests.agent.checkpoints import checkpointed, shard
from tests.agent.repair.test_reprotect import agents, stores
from tests.cli.commands import command

WITHOUT_ROOT = {"drill", "completion"}
WITHOUT_RESULTS = {"agent", "completion"}


def options_of(verb: str) -> dict[str, argparse.Action]:
    (verbs,) = (each for each in parser([verb])._actions if isinstance(each, argparse._SubParsersAction))
    return dict(verbs.choices[verb]._option_string_actions)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_takes_the_root_from_the_environment_and_prints_json(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`REPLICATED_CKPT_ROOT` and `-o json` mean the same everywhere."""
    monkeypatch.setenv("REPLICATED_CKPT_ROOT", "/from/the/environment")
    options = options_of(verb)
    assert (verb in WITHOUT_RESULTS) != ("-o" in options and "--output" in options)
    assert "--json" not in options
    if verb in WITHOUT_ROOT:
        assert "--root" not in options
    else:
        assert (options["--root"].default, options["--root"].required) == ("/from/the/environment", False)
        assert "REPLICATED_CKPT_ROOT" in str(options["--root"].help)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_lines(shell: str) -> None:
    """They name the command; another shell is refused."""
    done = command("completion", shell)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert "replicated-ckpt" in done.stdout
    assert command("completion", "tcsh").returncode == ExitCode.USAGE


@pytest.mark.parametrize(
    ("line", "words"), [("replicated-ckpt ver", {"verify"}), ("replicated-ckpt rm --obj", {"--object-store"})]
)
def test_bash_completes_verbs_and_options(tmp_path: Path, line: str, words: set[str]) -> None:
    """A real bash, with the lines of `completion bash`."""
    program = tmp_path / "replicated-ckpt"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={HOME} exec {sys.executable} -m replicated_ckpt "$@"\n')
    program.chmod(0o755)
    typed = line.split()
    script = f"""
        {command("completion", "bash").stdout}
        COMP_LINE="{line}" COMP_POINT={len(line)} COMP_TYPE=9 COMP_CWORD={len(typed) - 1} COMP_WORDS=({line})
        _python_argcomplete replicated-ckpt {typed[-1]} {typed[-2]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=path, capture_output=True, text=True, timeout=60, check=True
    )
    assert {word.strip() for word in done.stdout.split()} == words, done.stderr


@pytest.mark.parametrize(
    ("variables", "is_painted"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_verdicts_have_colours_on_terminals_alone(
    tmp_path: Path, variables: dict[str, str], *, is_painted: bool
) -> None:
    """NO_COLOR and a dumb terminal are respected. In a pipe there is no escape."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, {shard(0): (0,)}, copies=1)
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | variables
    ls = [sys.executable, "-m", "replicated_ckpt", "ls", "--root", str(node.root)]
    main_end, terminal = pty.openpty()
    with os.fdopen(main_end, "rb", 0) as shown:
        subprocess.run(ls, env=environment, stdout=terminal, timeout=60, check=True, cwd=HOME)
        os.close(terminal)
        text = shown.read(1 << 16).decode()
    assert ("\x1b[32m1 of 1\x1b[0m" in text) == is_painted, text
    assert "\x1b" not in command("ls", "--root", node.root).stdout


def test_copies_of_a_repair_show_how_far_they_are_on_a_terminal(tmp_path: Path) -> None:
    """The rate and the time left, by what the agents have fetched; nothing of it stays on the line, or goes to a pipe."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)}, size_bytes=24 << 20)
    (nodes[1].root / "step-1" / shard(0)).unlink()
    repair = [sys.executable, "-m", "replicated_ckpt", "repair", "--root", str(nodes[0].root)]
    with agents(nodes, "--copy-mib-per-s", "8", "--round-every-s", "600"):
        main_end, terminal = pty.openpty()
        with os.fdopen(main_end, "rb", 0) as shown:
            done = subprocess.run(repair, stdout=subprocess.PIPE, stderr=terminal, timeout=60, check=False, cwd=HOME)
            os.close(terminal)
            text = shown.read(1 << 16).decode()
    assert done.returncode == ExitCode.OK, done.stdout
    assert re.search(r"\r\x1b\[Kcopying: [\d.]+ MB of 25\.2 MB \(\d+%\) copied, [\d.]+ MB/s, \d s left", text), text
    assert text.endswith("\r\x1b[K")
