"""The version of the package, alone in its file so that the build and the agent read it without importing anything."""

__version__ = "0.1.0"

PROTOCOL = 1
"""What ranks and agents say to each other. Releases of one number work together; others refuse each other."""

RELEASE_HEADER = "X-Rckpt-Release"
RELEASE = f"{PROTOCOL} {__version__}"
"""What each request says of the process that sends it."""
