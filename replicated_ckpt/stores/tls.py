"""TLS between agents and their clients: the certificate is pinned by its fingerprint, which travels with the address."""

import hashlib
import hmac
import http.client
import ssl
from pathlib import Path

from replicated_ckpt.errors import ConfigInvalid, StoreDenied


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """What an agent accepts connections with: TLS 1.2 or newer.

    Raises:
        ConfigInvalid: the files are not a certificate and its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigInvalid(f"{certificate} and {key} are no certificate and its key: {exc}.") from exc
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
        raise ConfigInvalid(f"{certificate} holds no certificate: {exc}.") from exc


class PinnedConnection(http.client.HTTPSConnection):
    """A connection that goes on only if the other side has the key of exactly one certificate; no authority is asked."""

    def __init__(self, host: str, port: int, *, timeout: float, sha256: str, label: str) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the fingerprint is compared below, which is stricter
        super().__init__(host, port, timeout=timeout, context=context)
        self._sha256 = sha256
        self._label = label

    def connect(self) -> None:
        """Connects, and compares the certificate before anything is sent.

        Raises:
            StoreDenied: it is another one. OSError
        """
        super().connect()
        found = hashlib.sha256(self.sock.getpeercert(True) or b"").hexdigest()
        if not hmac.compare_digest(found.encode(), self._sha256.encode()):
            self.close()
            detail = f"expected the certificate of fingerprint {self._sha256[:16]}..., found {found[:16]}..."
            raise StoreDenied(self._label, "connect", "TLS", detail)
