"""What all commands share: how root and output are chosen, and shell completion."""

import argparse
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.cli.completion import LINES
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import VERBS, main, parser
from replicated_ckpt.cli.removal.remover import Remover
from tests.agent.agents import HOME
from tests.agent.checkpoints import checkpointed, shard, with_optimizer
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
    """`REPLICATED_CKPT_ROOT` and `-o json` work with every command."""
    monkeypatch.setenv("REPLICATED_CKPT_ROOT", "/from/the/environment")
    options = options_of(verb)
    assert (verb in WITHOUT_RESULTS) != ("-o" in options and "--output" in options)
    assert "--json" not in options
    if verb in WITHOUT_ROOT:
        assert "--root" not in options
    else:
        assert (options["--root"].default, options["--root"].required) == ("/from/the/environment", False)
        assert "REPLICATED_CKPT_ROOT" in str(options["--root"].help)


def test_without_arguments_the_help_is_printed() -> None:
    """Without arguments, the program prints its help with all commands."""
    done = command()
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert all(f"\n    {verb}" in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", ["rm", "slim", "reject"])
def test_commands_that_change_a_checkpoint_need_its_id(tmp_path: Path, verb: str) -> None:
    """For "latest", the command changes nothing, and names the id."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, {shard(0): (0,)}, copies=1)
    done = command(verb, "latest", "--root", node.root)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "The command takes the id of a checkpoint, not 'latest'. Hint: The newest one that can be" in done.stderr
    assert "is 'step-1'" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str) -> None:
    """`completion` prints a script for each shell, and refuses an unknown one."""
    done = command("completion", shell)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert "replicated-ckpt" in done.stdout
    assert command("completion", "tcsh").returncode == ExitCode.USAGE


@pytest.mark.parametrize(
    ("line", "words"), [("replicated-ckpt ver", {"verify"}), ("replicated-ckpt rm --obj", {"--object-store"})]
)
def test_bash_completes_verbs_and_options(tmp_path: Path, line: str, words: set[str]) -> None:
    """A real bash completes with the output of `completion bash`."""
    write_program(tmp_path)
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
    ("shell", "options", "ask"),
    [
        ("bash", ["--norc"], "complete -p replicated-ckpt"),
        ("zsh", ["-f"], "print -r -- $_comps[replicated-ckpt]"),
        ("fish", ["--no-config"], 'complete -C "replicated-ckpt ver"'),
    ],
)
def test_the_line_for_a_start_file_registers_the_completion(
    tmp_path: Path, shell: str, options: list[str], ask: str
) -> None:
    """The documented line for a start file works in each shell. Zsh needs `compinit` first."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    write_program(tmp_path)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}
    words = [shell, *options, "-c", f"{LINES[shell].replace('&& compinit', '&& compinit -u')}\n{ask}"]
    done = subprocess.run(words, env=path, capture_output=True, text=True, timeout=60, check=False)
    wanted = "verify" if shell == "fish" else "_python_argcomplete"
    assert (done.returncode, wanted in done.stdout) == (0, True), done
    assert done.stderr == ""


def write_program(folder: Path) -> None:
    program = folder / "replicated-ckpt"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={HOME} exec {sys.executable} -m replicated_ckpt "$@"\n')
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("variables", "is_painted"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_verdicts_have_colours_only_on_terminals(
    tmp_path: Path, variables: dict[str, str], *, is_painted: bool
) -> None:
    """NO_COLOR and a dumb terminal are respected, and a pipe gets no escape sequences."""
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


def test_repair_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    """A terminal shows the progress, the rate and the time left of the copies."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)}, size_bytes=24 << 20)
    (nodes[1].root / "step-1" / shard(0)).unlink()
    with agents(nodes, "--copy-mib-per-s", "8", "--round-every-s", "600"):
        code, text = run_on_terminal("repair", "--root", str(nodes[0].root))
    assert code == ExitCode.OK, text
    assert re.search(r"\r\x1b\[Kcopying: [\d.]+ MB of 25\.2 MB \(\d+%\) copied, [\d.]+ MB/s, \d s left", text), text


def run_on_terminal(*words: str, failpoint: str = "") -> tuple[int, str]:
    """The command's exit code, and its standard error on a terminal."""
    main_end, terminal = pty.openpty()
    with os.fdopen(main_end, "rb", 0) as shown:
        done = subprocess.run(
            [sys.executable, "-m", "replicated_ckpt", *words],
            env={**os.environ, failpoints.ENV: failpoint},
            stdout=subprocess.PIPE,
            stderr=terminal,
            timeout=60,
            check=False,
            cwd=HOME,
        )
        os.close(terminal)
        return done.returncode, shown.read(1 << 16).decode()


def test_prune_shows_its_progress_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress of `prune` counts the checkpoints that are removed."""
    (node,) = stores(tmp_path, 1)
    for number in (1, 2, 3):
        checkpointed([node], number, {shard(0): (0,)}, checkpoint_id=f"step-{number}", copies=1, size_bytes=1 << 20)
    monkeypatch.setenv(failpoints.ENV, "retire.gone=sleep:1.5@2")
    with agents([node]):
        code, text = run_on_terminal("prune", "--keep-last", "1", "--root", str(node.root))
    assert code == ExitCode.OK, text
    assert re.search(r"\r\x1b\[Kremoving: 1\.05 MB of 2\.1 MB \(50%\) removed, [\d.]+ [kM]B/s, \d s left", text), text


def test_the_removal_of_one_checkpoint_counts_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress counts the files of a checkpoint that its agent has already removed."""
    (node,) = stores(tmp_path, 1)
    for number in (1, 2):
        two = {shard(0): (0,), shard(1): (0,)}
        checkpointed([node], number, two, checkpoint_id=f"step-{number}", copies=1, size_bytes=1000)
    size_bytes = (node.root / "step-1" / shard(0)).stat().st_size
    found: list[tuple[int, int]] = []
    ask = Remover._ask_agent

    def remove_one_file(self: Remover, path: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
        if not document.get("is_asked"):
            (node.root / "step-1" / shard(0)).unlink()
            found.extend(self._look_how_far().values())
        return ask(self, path, document)

    monkeypatch.setattr(Remover, "_ask_agent", remove_one_file)
    with agents([node]):
        assert main(["rm", "step-1", "--root", str(node.root)]) == ExitCode.OK
    assert found == [(size_bytes, 2 * size_bytes)]


def test_slim_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    """The progress counts the optimizer files that are removed."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, with_optimizer({shard(0): (0,)}), copies=1, size_bytes=1 << 20)
    wait = "slim.dropped=sleep:0.5"
    code, text = run_on_terminal("slim", "step-1", "--force", "--root", str(node.root), failpoint=wait)
    assert code == ExitCode.OK, text
    assert "removing: 1.05 MB of 1.05 MB (100%) removed, " in text, text
