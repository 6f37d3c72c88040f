"""Writes checkpoints under each version of torch and reads them under all, with this package and with torch's reader.

make compat [ARGS="2.13.0 2.15.0"]     each version has its own environment, .venv-compat-VERSION
"""

import os
import subprocess
import sys
import tempfile
import venv
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
VERSIONS = ("2.7.1", "2.9.1", "2.11.0", "2.13.0", "2.15.0")
NEEDS = ("numpy>=1.26", "fastcrc>=0.5", "xxhash>=3.0", "cryptography>=42")
INSTALL_TIMEOUT_S = 3600
RUN_TIMEOUT_S = 900
ALL_READ, FAILED, NOT_COMPARED = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Compares the given versions, or all. Returns 1 if one cannot read another's checkpoints, 2 if fewer than two
    install.
    """
    python_by_version = {version: install(version) for version in arguments or VERSIONS}
    there = {version: python for version, python in python_by_version.items() if python is not None}
    missing = sorted(set(python_by_version) - set(there))
    sys.stdout.write(f"pip could not install torch {', '.join(missing)}: left out\n" if missing else "")
    if len(there) < 2:
        return NOT_COMPARED
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        roots = {version: Path(directory) / version for version in there}
        wrote = [v for v, python in there.items() if run(python, f"torch {v} writes", "save", roots[v])]
        failed += len(there) - len(wrote)
        for version, python in there.items():
            failed += not run(python, f"torch {version} reads", "read", *(roots[each] for each in wrote))
    return FAILED if failed else ALL_READ


def install(version: str) -> Path | None:
    """The interpreter of an environment with this torch. None if pip cannot install it."""
    where = HERE / f".venv-compat-{version}"
    python, stamp = where / "bin" / "python", where / "installed"
    if not stamp.exists():
        venv.create(where, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", f"torch=={version}", *NEEDS]
        if subprocess.run(command, timeout=INSTALL_TIMEOUT_S, check=False).returncode:
            return None
        stamp.touch()
    return python


def run(python: Path, title: str, *step: str | Path) -> bool:
    """Whether one step succeeds. Each step prints its parts. It is one process, because importing torch takes longest."""
    command = [str(python), str(Path(__file__).resolve()), "--step", *map(str, step)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    try:
        code: int | str = subprocess.run(command, timeout=RUN_TIMEOUT_S, check=False, env=environment).returncode
    except subprocess.TimeoutExpired:
        code = f"not done within {RUN_TIMEOUT_S} s"
    sys.stdout.write(f"{'FAILS' if code else 'ok   '} {title}{f': {code}' if code else ''}\n")
    sys.stdout.flush()
    return code == 0


# Under each torch --------------------------------------------------------------------------------------------------


def state(kind: str) -> dict[str, Any]:
    """A model, its optimizer after a step, tensors and a number. Kind "strided" adds a tensor that is not contiguous."""
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tensors = {
        "float": torch.full((4, 2), 1.5),
        "half": torch.full((3,), 2, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
    }
    if kind == "strided":
        tensors["turned"] = torch.arange(6.0).reshape(2, 3).t()
    return {"tensors": tensors, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 12}


def save(root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from replicated_ckpt import ReplicatedWriter

    for kind in ("plain", "strided"):
        dcp.save(state(kind), checkpoint_id=kind, storage_writer=ReplicatedWriter(root), no_dist=True)
        dcp.save(state(kind), checkpoint_id=str(root / f"stock-{kind}"), no_dist=True)


def load(kind: str, **where: Any) -> None:
    """Loads into a state with other values, and compares."""
    import torch
    import torch.distributed.checkpoint as dcp

    found, wanted = state(kind), state(kind)["tensors"]
    for tensor in found["tensors"].values():
        tensor.zero_()
    found["step"] = 0
    dcp.load(found, no_dist=True, **where)
    assert all(torch.equal(found["tensors"][name], tensor) for name, tensor in wanted.items()), found
    assert found["step"] == 12, found


def ours(root: Path, *names: str) -> None:
    from replicated_ckpt import ReplicatedReader

    for name in names:
        load(name.removeprefix("stock-"), checkpoint_id=name, storage_reader=ReplicatedReader(root))


READS: Mapping[str, Callable[[Path], None]] = {
    "ours by ours": lambda root: ours(root, "plain", "strided"),
    "stock's by ours": lambda root: ours(root, "stock-plain", "stock-strided"),
    "ours by stock": lambda root: load("plain", checkpoint_id=str(root / "plain")),
}


def read_all(roots: Sequence[Path]) -> int:
    """Reads what each version wrote, in each way. Prints each result and returns the number of failures."""
    from torch.distributed.checkpoint import CheckpointException  # not an Exception

    failed = 0
    for root in roots:
        for how, read in READS.items():
            error = ""
            try:
                read(root)
            except (Exception, CheckpointException) as exc:  # noqa: BLE001 - counted; the next read follows
                error = f": {type(exc).__name__}: {exc}"
                failed += 1
            sys.stdout.write(f"  {'FAILS' if error else 'ok   '} what {root.name} wrote, {how}{error}\n")
    sys.stdout.flush()
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        warnings.simplefilter("ignore")
        step, *paths = sys.argv[2:]
        if step == "read":
            sys.exit(FAILED if read_all([Path(path) for path in paths]) else ALL_READ)
        save(Path(paths[0]))
        sys.exit(ALL_READ)
    sys.exit(main(sys.argv[1:]))
