"""Commands that need torch, in a Python without it, as in the image of the agent."""

import subprocess
import sys
from pathlib import Path

WITHOUT_TORCH = """
import sys
from importlib.abc import MetaPathFinder
class NoTorch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
from replicated_ckpt.cli.main import main
sys.exit(main())
"""


def test_a_command_that_needs_torch_is_a_usage_error(tmp_path: Path) -> None:
    """The command exits with 2, names torch and this Python, and writes nothing."""
    words: list[str | Path] = ["import", "--root", tmp_path / "root", "--from", "torch", tmp_path / "x.pt", "step-1"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert (
        f"`import` needs torch, which this Python ({sys.executable}) does not have. Hint: Run it where" in done.stderr
    )
    assert not (tmp_path / "root").exists()
