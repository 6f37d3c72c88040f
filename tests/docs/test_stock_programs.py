"""Programs for stock DCP: a small patch turns each of them into the example that other tests run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LINES_ADDED = {"fsdp1_fashion_mnist": 5, "getting_started": 4, "ddp": 6, "timestamped_output": 8}


@pytest.mark.parametrize("name", LINES_ADDED)
def test_a_patch_of_a_few_lines_makes_the_example(tmp_path: Path, name: str) -> None:
    """The patched program is the example, byte for byte. Each added line is marked in the example."""
    program, patch = EXAMPLES / "stock" / f"{name}.py", EXAMPLES / "stock" / f"{name}.patch"
    assert "replicated_ckpt" not in program.read_text(encoding="utf-8")
    shutil.copy(program, tmp_path)
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True, timeout=30)
    example = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert (tmp_path / f"{name}.py").read_text(encoding="utf-8") == example
    added = [line[1:] for line in patch.read_text(encoding="utf-8").splitlines() if re.match(r"\+(?!\+\+ ).", line)]
    assert len(added) == LINES_ADDED[name]
    assert added == [line for line in example.splitlines() if "# <-" in line]


def test_every_program_has_its_patch() -> None:
    """The directory has one patch for each program, and no other files."""
    found = {path.name for path in (EXAMPLES / "stock").iterdir() if path.is_file()}
    assert found == {f"{name}.{kind}" for name in LINES_ADDED for kind in ("py", "patch")} | {"README.md"}


def test_the_shortest_job_needs_only_the_package() -> None:
    """The example can be copied: it imports only the public interface, torch and the standard library."""
    text = (EXAMPLES / "fashion_mnist.py").read_text(encoding="utf-8")
    modules = set(re.findall(r"^ *(?:from|import) ([\w.]+)", text, flags=re.MULTILINE))
    assert {module for module in modules if module.startswith("replicated_ckpt")} == {"replicated_ckpt"}
    assert {module.partition(".")[0] for module in modules} == {
        "argparse",
        "gzip",
        "os",
        "pathlib",
        "replicated_ckpt",
        "torch",
        "typing",
    }
