"""The listening socket of an agent: on all addresses of a host, those of IPv6 as those of IPv4."""

import socket
import socketserver
from http.server import ThreadingHTTPServer
from typing import Any

ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - a token guards it
_MAPPED = "::ffff:"
"""An IPv4 address as a socket for both sees it begins so. Source: RFC 4291, 2.5.5.2."""


class DualStackServer(ThreadingHTTPServer):
    """Listens on `bind`. With 0.0.0.0 that is on IPv6, too, where the host has it: peers may have no other way here.

    `server_address` is the address as it was asked for, with the port that was taken.
    """

    def __init__(self, bind: tuple[str, int], handler: Any) -> None:
        self._asked = bind[0]
        takes_both = bind[0] == ALL_ADDRESSES and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if takes_both or ":" in bind[0] else socket.AF_INET
        super().__init__(("::" if takes_both else bind[0], bind[1]), handler)

    def server_bind(self) -> None:
        """Without the look-up of a name that `http.server` makes: where DNS does not answer it takes many seconds."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        found, self.server_port = self.socket.getsockname()[:2]
        self.server_name = self._asked if self._asked == ALL_ADDRESSES else found
        self.server_address = (self.server_name, self.server_port)

    def get_request(self) -> tuple[Any, Any]:
        """The next connection, and where it comes from, an IPv4 address as such."""
        request, (host, *rest) = super().get_request()
        return request, (host.removeprefix(_MAPPED), *rest)
