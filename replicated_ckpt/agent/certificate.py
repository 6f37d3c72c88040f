"""The certificate of an agent. The operator provides it in files, and may renew it, or the agent makes one at its start."""

import datetime as dt
import logging
import ssl
from pathlib import Path

from replicated_ckpt.config import AgentConfig
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.ownership import read_private
from replicated_ckpt.stores.peer.tls import (
    PLAIN_HINT,
    can_encrypt,
    fingerprint,
    is_loopback,
    is_network_trusted,
    pin_name,
    server_context,
)

log = logging.getLogger(__name__)

CERTIFICATE_NAME = "tls.pem"
_NAME = "replicated_ckpt agent"
_DAYS = 36500  # any large number: peers compare the fingerprint and ignore the date
_EARLIER_MAX = 4  # a bound: a file that is renewed every minute must not collect contexts for years


class ShownCertificate:
    """The certificate in the agent's files, and a few earlier ones, which the agent still shows to clients that pin them.

    So a renewal interrupts neither a save in progress nor a peer that has only the earlier fingerprint. One thread calls
    `take_up`.
    """

    def __init__(self, certificate: str, key: str) -> None:
        self._files = Path(certificate), Path(key)
        self._seen = self._look()
        self._current = server_context(certificate, key)
        self.sha256 = fingerprint(certificate)
        self._context_by_name = {pin_name(self.sha256): self._current}
        self.context = server_context(certificate, key)
        self.context.sni_callback = self._choose

    @property
    def names(self) -> tuple[str, ...]:
        """The `pin_name` of each certificate that the agent shows, the current one last."""
        return (*self._context_by_name, pin_name(self.sha256))

    def take_up(self) -> None:
        """Loads the certificate again if its files have changed, and shows it from now on.

        If certificate and key do not match, for example while they are being written, the previous pair stays until the
        files change again.
        """
        seen = self._look()
        if seen == self._seen:
            return
        # Set before the files are parsed: a broken pair is logged once, not at every look.
        self._seen = seen
        certificate, key = map(str, self._files)
        try:
            context, sha256 = server_context(certificate, key), fingerprint(certificate)
        except ConfigInvalid as exc:
            log.warning(
                "the files of the certificate changed, but are not usable; the agent keeps the previous certificate: %s",
                exc,
            )
            return
        # Key and certificate are two files: a renewal in between would pair an old key with a new certificate.
        if self._look() != seen:
            self._seen = None  # the files changed meanwhile: the next call loads them
        elif sha256 != self.sha256:
            log.info("the certificate was renewed: %s... after %s...", sha256[:16], self.sha256[:16])
            self._current, self.sha256 = context, sha256
            # Peers that do not have the new fingerprint yet ask for an earlier certificate by its name (SNI).
            kept = list(self._context_by_name.items())[-_EARLIER_MAX:]
            self._context_by_name = {**dict(kept), pin_name(sha256): context}

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Called in a handshake. `name`: the certificate that a client of this package expects; others send any or none."""
        connection.context = self._context_by_name.get(name or "", self._current)

    def _look(self) -> tuple[tuple[int, int, int], ...] | None:
        """Inode, time and size of both files, which change when one is written or replaced; None if one is absent."""
        try:
            found = [path.stat() for path in self._files]
        except OSError:
            return None
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)


def open_certificate(config: AgentConfig, directory: Path) -> ShownCertificate | None:
    """The certificate of the files that `certificate_of` returns. None: the agent uses plain HTTP."""
    files = certificate_of(config, directory)
    return None if files is None else ShownCertificate(*files)


def certificate_of(config: AgentConfig, directory: Path) -> tuple[str, str] | None:
    """The files of certificate and private key of an agent; None: it uses plain HTTP.

    An agent that listens on loopback alone uses plain HTTP, unless an earlier start made a certificate. Peers expect that
    certificate.

    Raises:
        ConfigInvalid: no certificate can be made, or the stored one is damaged. StoreError: of the node's own disk.
    """
    if config.tls_cert:
        return config.tls_cert, config.tls_key
    if is_network_trusted():
        return None
    path = directory / CERTIFICATE_NAME
    # Looked for before loopback: peers that pin this certificate refuse plain HTTP from this node.
    if is_there(path):
        return _read_kept(path)
    if is_loopback(config.host):
        return None
    if not can_encrypt():
        log.warning("traffic to other nodes is not encrypted: the package `cryptography` is missing. %s", PLAIN_HINT)
        return None
    with translate_errors(str(directory), "write", CERTIFICATE_NAME):
        write_file(path, _make(), mode=0o600)  # it holds the private key
    return str(path), str(path)


def _read_kept(path: Path) -> tuple[str, str]:
    read_private(path)
    try:
        fingerprint(str(path))
    except ConfigInvalid as exc:
        hint = f"Remove {path}: the agent makes a new one, and the next save or load announces it to the other nodes."
        raise ConfigInvalid(exc.message, hint) from exc
    return str(path), str(path)


def _make() -> bytes:
    """A new private key and its self-signed certificate, as PEM."""
    try:
        # An optional package: an agent on loopback or in a trusted network works without it.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as exc:
        raise ConfigInvalid(f"The certificate cannot be made: {exc}.", PLAIN_HINT) from exc
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    begin = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)  # clocks differ
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + dt.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding, encryption = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, encryption)
    return private + certificate.public_bytes(encoding)
