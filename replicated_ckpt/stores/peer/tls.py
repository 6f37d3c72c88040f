"""TLS between agents and their clients: the certificate is pinned by its fingerprint, which is part of the address.

Traffic to other hosts is encrypted, unless the user has declared the network as trusted.
"""

import functools
import hashlib
import hmac
import http.client
import ipaddress
import logging
import os
import ssl
from importlib.util import find_spec
from pathlib import Path

from replicated_ckpt.environment import PLAIN_ENV, TLS_CERT_ENV, is_switched_on
from replicated_ckpt.errors import ConfigInvalid, StoreDenied

log = logging.getLogger(__name__)

_PAIR_HINT = "Set REPLICATED_CKPT_TLS_CERT and ..._TLS_KEY to a certificate and its key, both PEM; or set neither."
PLAIN_HINT = (
    f"Either all nodes encrypt their traffic or none does. Without encryption, set {PLAIN_ENV}=1 on all of "
    "them (`--plain` for an agent). With it, unset the variable, and `pip install cryptography` where it is "
    "missing."
)


def is_loopback(host: str) -> bool:
    """Whether traffic to `host` stays on this host. False for an IPv4 address written as IPv6, on every Python.

    Source: from Python 3.13 on `is_loopback` of `ipaddress` is True for ::ffff:127.0.0.1.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback and getattr(address, "ipv4_mapped", None) is None


def is_network_trusted() -> bool:
    """Whether the user has switched encryption off."""
    return is_switched_on(PLAIN_ENV)


def can_encrypt() -> bool:
    """Whether an agent of this Python has, or can make, a certificate."""
    return bool(os.environ.get(TLS_CERT_ENV)) or find_spec("cryptography") is not None


def is_plain_allowed(host: str) -> bool:
    """Whether connections to `host` without TLS are allowed."""
    return is_loopback(host) or is_network_trusted() or not can_encrypt()


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """The TLS context of an agent: TLS 1.3, without resumption or renegotiation.

    Raises:
        ConfigInvalid: the files are not a certificate and its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # clients never resume a session, so a ticket is only traffic
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigInvalid(f"{certificate} and {key} are not a certificate and its key: {exc}.", _PAIR_HINT) from exc
    return context


def fingerprint(certificate: str) -> str:
    """SHA-256 of a certificate, in hexadecimal digits; of the first one in a PEM file.

    Raises:
        ConfigInvalid: the file holds none.
    """
    try:
        text = Path(certificate).read_text(encoding="ascii")
        begin = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).hexdigest()
    except (OSError, ValueError) as exc:
        raise ConfigInvalid(f"{certificate} holds no certificate: {exc}.", _PAIR_HINT) from exc


def pin_name(sha256: str) -> str:
    """The server name that a client sends: the expected fingerprint, by which an agent can choose an older certificate."""
    return f"{sha256[:32]}.{sha256[32:]}"  # a label of a DNS name has at most 63 characters


@functools.cache
def _client_context() -> ssl.SSLContext:
    """One context for all connections: it holds nothing about the peer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `PinnedConnection` compares the fingerprint, which is stricter
    return context


@functools.cache
def _warn_of_plain_talk(label: str) -> None:
    """Warns once for each peer in a process."""
    log.warning("traffic to %s is not encrypted, as the package `cryptography` is missing here. %s", label, PLAIN_HINT)


class PlainConnection(http.client.HTTPConnection):
    """A connection without TLS: on this host, or where the user trusts the network."""

    def __init__(self, host: str, port: int, *, timeout: float, label: str) -> None:
        super().__init__(host, port, timeout=timeout)
        self._label = label

    def connect(self) -> None:
        """Connects.

        Raises:
            StoreDenied: encryption is required, and the address has no fingerprint. OSError
        """
        # The request's header has the token: sent unencrypted, anyone on the network could use it.
        if not is_plain_allowed(self.host):
            detail = "its address has no fingerprint of a certificate, and nothing is sent there unencrypted"
            raise StoreDenied(self._label, "connect by TLS to", "", detail, PLAIN_HINT)
        if not (is_loopback(self.host) or is_network_trusted()):
            _warn_of_plain_talk(self._label)
        super().connect()


class PinnedConnection(http.client.HTTPSConnection):
    """A connection that accepts exactly one certificate, by its fingerprint. The signature does not matter."""

    def __init__(self, host: str, port: int, *, timeout: float, sha256: str, label: str, hint: str) -> None:
        super().__init__(host, port, timeout=timeout, context=_client_context())
        self._sha256 = sha256
        self._label = label
        self._hint = hint

    def connect(self) -> None:
        """Connects, and compares the certificate before anything is sent.

        Raises:
            StoreDenied: the fingerprint differs. OSError
        """
        http.client.HTTPConnection.connect(self)
        self.sock = _client_context().wrap_socket(self.sock, server_hostname=pin_name(self._sha256))
        # Before the first request: its header has the token.
        found = hashlib.sha256(self.sock.getpeercert(True) or b"").hexdigest()
        if not hmac.compare_digest(found.encode(), self._sha256.encode()):
            self.close()
            detail = f"expected the certificate with fingerprint {self._sha256[:16]}..., found {found[:16]}..."
            raise StoreDenied(self._label, "connect by TLS to", "", detail, self._hint)
