"""Python imports this by itself at the start of every process whose PYTHONPATH has this folder: the ranks' too."""

from tests.referee import hook

hook.install()
