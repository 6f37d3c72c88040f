"""The certificate of an agent: made when it first listens beyond loopback, and kept, as other nodes know it by this one."""

import datetime as dt
import logging
from pathlib import Path

from replicated_ckpt.config import AgentConfig
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.durable import translate_errors, write_file
from replicated_ckpt.stores.files.ownership import read_private
from replicated_ckpt.stores.peer.tls import PLAIN_HINT, can_encrypt, fingerprint, is_loopback, is_network_trusted

log = logging.getLogger(__name__)

CERTIFICATE_NAME = "tls.pem"
_NAME = "replicated_ckpt agent"
_DAYS = 36500  # it is known by its fingerprint and never expires; this is as good as any number


def certificate_of(config: AgentConfig, directory: Path) -> tuple[str, str] | None:
    """The files of certificate and private key with which an agent serves; None: it speaks plain HTTP.

    One that listens on loopback only speaks plain HTTP, unless it has once had a certificate of its own: then its peers
    expect that one.

    Raises:
        ConfigInvalid: none can be made, or the one that was kept is damaged. StoreError
    """
    if config.tls_cert:
        return config.tls_cert, config.tls_key
    if is_network_trusted():
        return None
    path = directory / CERTIFICATE_NAME
    if path.exists():
        return _read_kept(path)
    if is_loopback(config.host):
        return None
    if not can_encrypt():
        log.warning(
            "other nodes are talked to without encryption, as the package `cryptography` is missing. %s", PLAIN_HINT
        )
        return None
    with translate_errors(str(directory), "write", CERTIFICATE_NAME):
        write_file(path, _make(), mode=0o600)
    return str(path), str(path)


def _read_kept(path: Path) -> tuple[str, str]:
    read_private(path)
    try:
        fingerprint(str(path))
    except ConfigInvalid as exc:
        hint = f"Remove {path}: a new one is made, and the other nodes learn of it with the next save or load."
        raise ConfigInvalid(exc.message, hint) from exc
    return str(path), str(path)


def _make() -> bytes:
    """A new private key and a certificate that it signed itself, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as exc:
        raise ConfigInvalid(f"No certificate can be made: {exc}.", PLAIN_HINT) from exc
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
