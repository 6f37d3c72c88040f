"""The version of the package, alone in its file so that the build and the agent read it without importing anything."""

__version__ = "0.1.0"

PROTOCOL = 1
"""Version of the protocol between ranks and agents. Releases with the same number interoperate; others are refused."""

RELEASE_HEADER = "X-Rckpt-Release"
RELEASE = f"{PROTOCOL} {__version__}"
"""Sent with each request: protocol and release of the sending process."""
