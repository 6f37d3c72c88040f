"""What an agent gets from the rank that starts it. It serves later jobs, too: so exactly these variables, and no path."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

_PREFIXES = ("REPLICATED_CKPT_", "LC_")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_NAMES = {
    "PATH", "HOME", "TMPDIR", "LANG", "TZ",
    "LD_LIBRARY_PATH",  # without it the rank's own Python may not start
    # The way to an object store. Its credentials come with its name, from the rank that names it;
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", *_PROXIES, *(name.lower() for name in _PROXIES),
    # or lie in files, or come with the role of a pod, which no option of a client names.
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CA_BUNDLE", "AWS_EC2_METADATA_DISABLED",
    "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
}  # fmt: skip
_DEPENDENCIES = ("fastcrc", "cryptography", "fsspec", "s3fs")


def agent_environment() -> dict[str, str]:
    """The variables of this process that its agent gets."""
    return {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}


def isolated_python() -> list[str]:
    """The command that runs this very package's agent in this Python; the agent's own arguments follow."""
    package = Path(__file__).resolve().parents[2]
    homes = [str(package.parent), *filter(None, map(_home, _DEPENDENCIES))]
    options = ["-I", "-X", f"utf8={sys.flags.utf8_mode}"]  # names of files are encoded as in this process
    return [sys.executable or "", *options, str(Path(__file__).with_name("isolated.py")), *dict.fromkeys(homes), "--"]


def _home(module: str) -> str | None:
    """The folder in which this process finds a package that this one needs; None where it has none."""
    spec = find_spec(module)
    return str(Path(spec.origin).resolve().parents[1]) if spec is not None and spec.origin else None
