"""Runs the agent for ranks, with `python -I`: it imports this package from the rank's Python, and none of the user's code.

    python -I .../replicated_ckpt/agent/isolated.py FOLDER ... -- ARGUMENT ...

In each FOLDER the rank found dependencies of this package. Python searches them last, and does not search the user's paths.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def main() -> int:
    """Runs the agent with the arguments behind `--`; returns its exit code."""
    end = sys.argv.index("--")
    # The agent's own parser must not see the folders.
    folders, sys.argv[1:] = sys.argv[1:end], sys.argv[end + 1 :]
    sys.path += [folder for folder in folders if folder not in sys.path]
    spec = spec_from_file_location(_PACKAGE.name, _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)])
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    sys.modules[_PACKAGE.name] = package  # the agent runs this package, even if another one of its name is installed
    spec.loader.exec_module(package)
    from replicated_ckpt.agent.__main__ import main as agent_main

    return agent_main()


if __name__ == "__main__":
    sys.exit(main())
