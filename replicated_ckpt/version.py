"""The version of the package, alone in its file so that the build and the agent read it without importing anything."""

__version__ = "0.1.0"
