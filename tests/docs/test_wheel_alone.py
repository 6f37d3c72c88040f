"""The package with only its declared dependencies. `make dist` does the same with the wheel."""

import json
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.wheel_alone import AloneError, check_bucket, check_commands, run

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = PROJECT["name"]
PROGRAM = str(ROOT / "examples" / "getting_started.py")
FORKING = """
import json, os, runpy, socket, sys
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp
for ranks, words in json.loads(sys.argv[1]):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            sys.argv = words
            if ranks > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            runpy.run_path(words[0], run_name="__main__")
            sys.exit()
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(f"{words} failed")
"""
"""Runs programs in turn, each with some ranks, with a single import of torch, which is slow. `make dist` uses torchrun."""


def needs_of(name: str, extra: str) -> list[Requirement]:
    """The requirements of a package. Those of this project come from pyproject.toml, not from the installed metadata."""
    if canonicalize_name(name) == NAME:
        texts = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, [])]
    else:
        try:
            texts = list(distribution(name).requires or [])
        except PackageNotFoundError:
            return []  # not installed; if the package is needed, a test below fails
    needs = [Requirement(text) for text in texts]
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]


def declared(name: str, extras: set[str]) -> set[str]:
    """The names of a package and of all its transitive requirements, with these extras."""
    seen: set[tuple[str, str]] = set()
    wanted = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while wanted:
        one = wanted.pop()
        if one not in seen:
            seen.add(one)
            wanted += [(canonicalize_name(need.name), extra) for need in needs_of(*one) for extra in ("", *need.extras)]
    return {found for found, _ in seen}


def top_level_of(name: str) -> Iterator[Path]:
    """The files and folders of a package in site-packages."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    for first in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
        yield Path(str(found.locate_file(first)))


def environment_with(where: Path, names: set[str]) -> Path:
    """Makes an environment with these packages and this project's files. Returns its interpreter."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(where)
    (site,) = where.glob("lib/python*/site-packages")
    for name in names - {NAME}:
        for path in top_level_of(name):
            if not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    (site / "replicated_ckpt").symlink_to(ROOT / "replicated_ckpt")
    return where / "bin" / "python"


def check_job(python: Path, folder: Path) -> None:
    """Runs the README's job, two ranks that save, two other ranks that load, and the command line."""
    root = folder / "root"
    jobs = [(1, [str(ROOT / "tools" / "readme_job.py"), str(ROOT / "README.md")])]
    jobs += [(2, [PROGRAM, action, "--root", str(root)]) for action in ("save", "load")]
    lines = run([python, "-c", FORKING, json.dumps(jobs)], cwd=folder).splitlines()
    saved, loaded = (line.rpartition(": ")[2] for line in lines if line.startswith(("saved: ", "loaded: ")))
    assert saved == loaded
    check_commands(python, root)


@pytest.mark.long  # `make dist`, which the workflow runs, does the same with the wheel
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_the_main_job_needs_what_is_declared(tmp_path: Path) -> None:
    """No package is missing from `dependencies`."""
    check_job(environment_with(tmp_path / "alone", declared(NAME, set())), tmp_path)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_a_bucket_needs_what_the_extra_declares(tmp_path: Path) -> None:
    """With `[s3]`, a save to S3 and a load work. `[drill]` has the server."""
    alone = environment_with(tmp_path / "s3", declared(NAME, {"s3"}))
    check_bucket(alone, server=environment_with(tmp_path / "drill", declared(NAME, {"drill"})))


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_a_missing_dependency_is_found(tmp_path: Path) -> None:
    """Shows that the tests above can fail: without numpy, the save of two ranks fails."""
    with pytest.raises(AloneError, match=r"Numpy is not available|No module named 'numpy'"):
        check_job(environment_with(tmp_path / "alone", declared(NAME, set()) - {"numpy"}), tmp_path)


@pytest.mark.parametrize("extra", ["s3", "drill", "test", "dev", "referee"])
def test_no_extra_can_replace_the_users_torch(extra: str) -> None:
    """No extra requires torch, not even indirectly: torchvision, for one, pins a torch version."""
    added = declared(NAME, {extra}) - declared(NAME, set())
    assert [name for name in added if any(need.name == "torch" for need in needs_of(name, ""))] == []
