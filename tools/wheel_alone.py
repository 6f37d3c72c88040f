"""Checks the wheel with only its declared dependencies: README's job, a save and a load on two ranks, the command line.

    make dist [TORCH=2.13.0]                                      builds the wheel, then runs this
    python tools/wheel_alone.py dist/NAME.whl [--torch VERSION] [--extras s3,drill,test]

The wheel is installed into an empty environment. Each extra gets its own environment, which sees the first one and adds
the extra's packages. There the same checks and those of the extra must pass, and the extra must not replace torch.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parents[1]
# Left out: `frameworks`, which `make frameworks` checks; `bench-peers`, which is installed without its dependencies;
# `docs`, which needs neither this package nor torch. Those of INTEGRATIONS are checked only if named, because each is
# large.
EXTRAS = ("drill", "s3", "completion", "test", "dev", "referee")
INTEGRATIONS = ("accelerate", "lightning", "ray", "torchtitan", "transformers")
RUN_TIMEOUT_S = 600
INSTALL_TIMEOUT_S = 3600
AGENT_IDLE_S, AGENT_LEAVES_WITHIN_S = 2, 60
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SITE_CODE = "import site; print(site.getsitepackages()[0])"
TORCH_CODE = "import torch; print(torch.__version__, torch.__file__)"
CLI_CODE = "import sys; from replicated_ckpt.cli.main import main; sys.exit(main())"
BUCKET_CODE = """
import os, sys, torch, torch.distributed.checkpoint as dcp
from replicated_ckpt import ReplicatedReader, ReplicatedWriter
where = {"object_store": "s3://bucket/run", "storage_options": {"client_kwargs": {"endpoint_url": sys.argv[2]},
                                                                "key": "alone", "secret": "alone-secret"}}
writer = ReplicatedWriter(sys.argv[1], **where)
dcp.save({"a": torch.arange(9)}, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
writer.wait()
state = {"a": torch.zeros(9, dtype=torch.int64)}
dcp.load(state, checkpoint_id="latest", storage_reader=ReplicatedReader(**where), no_dist=True)
assert state["a"].tolist() == list(range(9)), state
"""


class AloneError(Exception):
    """A check of the wheel failed."""


def main() -> int:
    """Installs and checks. Returns 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--torch", metavar="VERSION", help="the user's torch, installed first (default: what pip picks)"
    )
    parser.add_argument("--extras", default=",".join(EXTRAS), help="default: %(default)s")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve(strict=True)
    base = HERE / ".venv-wheel"
    try:
        _step("an empty environment", lambda: _install_base(base, wheel, arguments.torch))
        _step("the wheel alone", lambda: check_main_job(base / "bin" / "python"))
        for extra in filter(None, arguments.extras.split(",")):
            python = base.with_name(f"{base.name}-{extra}") / "bin" / "python"
            _step(f"[{extra}] installed", partial(_install_extra, python, base, wheel, extra))
            _step(f"[{extra}] works", partial(check_extra, python, extra))
    except AloneError as exc:
        sys.stdout.write(f"{exc}\n")
        return 1
    return 0


def _step(title: str, do: Callable[[], None]) -> None:
    started = time.monotonic()
    do()
    sys.stdout.write(f"ok {title}, {time.monotonic() - started:.0f} s\n")
    sys.stdout.flush()


# Environments --------------------------------------------------------------------------------------------------------


def _install_base(where: Path, wheel: Path, torch: str | None) -> None:
    venv.create(where, with_pip=True, clear=True)
    python = where / "bin" / "python"
    if torch:
        _pip(python, f"torch=={torch}")
    _pip(python, str(wheel))


def _install_extra(python: Path, base: Path, wheel: Path, extra: str) -> None:
    """Creates an environment that also sees the packages of `base`.

    Raises:
        AloneError: the extra brings another torch, or `pip check` finds a conflict.
    """
    venv.create(python.parents[1], with_pip=True, clear=True)
    site, shown = (Path(run([each, "-c", SITE_CODE]).strip()) for each in (python, base / "bin" / "python"))
    (site / "base.pth").write_text(f"{shown}\n")
    before = run([base / "bin" / "python", "-c", TORCH_CODE])
    _pip(python, f"{wheel}[{extra}]")
    run([python, "-m", "pip", "check"])
    after = run([python, "-c", TORCH_CODE])
    if after != before:
        raise AloneError(f"[{extra}] replaces the user's torch: {before.strip()}, then {after.strip()}")


def _pip(python: Path, what: str) -> None:
    run([python, "-m", "pip", "install", "--quiet", what], timeout_s=INSTALL_TIMEOUT_S)


# Checks --------------------------------------------------------------------------------------------------------------


def check_main_job(python: Path) -> None:
    """What every user does first, with this interpreter's packages.

    Raises:
        AloneError: has the command and the end of its output.
    """
    with _folder() as folder:
        root = folder / "root"
        run([python, HERE / "tools" / "readme_job.py", HERE / "README.md"], cwd=folder)
        program = HERE / "examples" / "getting_started.py"
        outputs = [run([python, *TORCHRUN, program, action, "--root", root], cwd=folder) for action in ("save", "load")]
        saved, loaded = (text.strip().rpartition(": ")[2] for text in outputs)
        if not saved or saved != loaded:
            raise AloneError(f"two ranks saved a state with the sum {saved!r} and loaded {loaded!r}")
        check_commands(python, root)
        command = python.with_name("replicated-ckpt")
        if command.exists():
            run([command, "--version"], cwd=folder)


def check_commands(python: Path, root: Path) -> None:
    """The command line lists and verifies the checkpoints. Raises: AloneError"""
    for verb in ("ls", "verify"):
        run([python, "-c", CLI_CODE, verb, "--root", root], cwd=root)


def check_extra(python: Path, extra: str) -> None:
    """The main job still works, and the extra's purpose works.

    Raises:
        AloneError
    """
    check_main_job(python)
    if extra == "drill":
        check_drill(python)
    elif extra == "s3":
        check_bucket(python, server=python.parents[1].with_name(".venv-wheel-drill") / "bin" / "python")
    elif extra in IMPORTS:
        run([python, "-c", f"import {IMPORTS[extra]}"])


IMPORTS: Mapping[str, str] = {
    "test": "pytest, pytest_timeout, xdist, hypothesis, moto.server, kubernetes_validate, safetensors.torch, ckpt_chaos",
    "dev": "mypy.api, ruff",
    "referee": "expecttest",
    **{name: f"replicated_ckpt.integrations.{name}" for name in INTEGRATIONS},
}


def check_drill(python: Path) -> None:
    """The drill's scenario with a bucket uses every dependency of the drill."""
    drill = ["drill", "--nodes", "2", "--ranks-per-node", "1", "--scenario", "cluster", "-o", "json"]
    run([python, "-c", CLI_CODE, *drill])


def check_bucket(python: Path, *, server: Path) -> None:
    """Saves to S3 and loads from there alone. `server` is an interpreter with moto."""
    command = [str(server), "-m", "replicated_ckpt.drill.moto_server", "bucket"]
    with (
        _folder() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not urlsplit(url).port:
            raise AloneError("moto did not start")
        try:
            run([python, "-c", BUCKET_CODE, folder / "root", url], cwd=folder)
        finally:
            process.stdin.close()  # ends moto


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder that is removed after the agents of the roots in it have exited, because they write there until then."""
    with tempfile.TemporaryDirectory(prefix="wheel-alone-") as name:
        yield Path(name)
        deadline = time.monotonic() + AGENT_LEAVES_WITHIN_S
        for endpoint in Path(name).glob("**/.agent/endpoint.json"):
            pid = 0
            with contextlib.suppress(FileNotFoundError):  # the agent is exiting
                pid = json.loads(endpoint.read_text())["pid"]
            while pid and Path(f"/proc/{pid}").exists():
                if time.monotonic() > deadline:
                    raise AloneError(f"the agent {pid} of {endpoint.parents[1]} does not leave")
                time.sleep(0.1)


def run(command: Sequence[object], *, cwd: str | Path | None = None, timeout_s: float = RUN_TIMEOUT_S) -> str:
    """Runs a command and returns its output. It does not see this process's own packages."""
    words = [str(word) for word in command]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"OMP_NUM_THREADS": "1", "REPLICATED_CKPT_AGENT_IDLE_S": str(AGENT_IDLE_S), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd, env=environment
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-4000:]
        raise AloneError(f"{' '.join(words)}\nended with {done.returncode}:\n{output}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
