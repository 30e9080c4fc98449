"""What `shmcache export` serves: metrics, snapshots as JSON, one page that draws them.

Contract    GET only, of four paths: `/`, `/metrics`, `/api/pools`, `/api/pools/NAME`. Never
            connects to anybody. On a loopback address it answers only requests that were meant for
            one: a stranger's web page cannot reach it through a name of its own (DNS rebinding).
Concurrency A thread per connection; at most one look at a pool at a time.
Death       Holds nothing shared.
"""

from __future__ import annotations

import ipaddress
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shmcache import PoolSnapshot, bounds
from shmcache.errors import ContractError
from shmcache.integrations.prometheus import PoolCollector
from shmcache.integrations.watched import WatchedPools, state_of

_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_SILENT_S = 10  # a client that sends nothing has its thread for so long
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class ExportServer(ThreadingHTTPServer):
    """Bound to an address; `serve_forever()` serves. Port 0 takes a free one: `server_port`."""

    daemon_threads = True

    def __init__(self, host: str, port: int, *names: str, owners: bool = True) -> None:
        address = ipaddress.ip_address(host)
        self.address_family = _FAMILIES[address.version]
        self.loopback = address.is_loopback
        self.pools = WatchedPools(*names)
        self.registry = CollectorRegistry()
        self.registry.register(PoolCollector(pools=self.pools, owners=owners))
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of the host's name that the base class makes: it may ask a server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def server_close(self) -> None:
        """Also let go of the pools."""
        super().server_close()
        self.pools.close()


class _Handler(BaseHTTPRequestHandler):
    server: ExportServer
    timeout = _SILENT_S
    server_version, sys_version = "shmcache", ""

    def do_GET(self) -> None:
        if self.server.loopback and not _means_loopback(self.headers.get("Host", "")):
            self._say(HTTPStatus.FORBIDDEN, "text/plain", b"this address is for this host only\n")
            return
        path = unquote(urlsplit(self.path).path)
        if path == "/":
            page = resources.files("shmcache.integrations").joinpath("page.html").read_bytes()
            self._say(HTTPStatus.OK, "text/html; charset=utf-8", page)
        elif path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._say(HTTPStatus.OK, kind, encode(self.server.registry))
        elif path == "/api/pools":
            looks = self.server.pools.look_at_all()
            self._say_json(HTTPStatus.OK, {"pools": [_brief(*item) for item in looks.items()]})
        elif path.startswith("/api/pools/"):
            self._say_snapshot(path.removeprefix("/api/pools/"))
        else:
            self._say(HTTPStatus.NOT_FOUND, "text/plain", b"/ /metrics /api/pools\n")

    def _say_snapshot(self, name: str) -> None:
        if name not in self.server.pools.names():
            self._say_json(HTTPStatus.NOT_FOUND, {"name": ascii(name), "state": "absent"})
            return
        look = self.server.pools.look(bounds.pool_name(name))
        if isinstance(look, PoolSnapshot):
            self._say_json(HTTPStatus.OK, look)
        else:
            self._say_json(HTTPStatus.SERVICE_UNAVAILABLE, _brief(name, look))

    def _say_json(self, status: HTTPStatus, document: Any) -> None:
        self._say(status, "application/json", msgspec.json.encode(document))

    def _say(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", _PAGE_POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Scrapes come every few seconds: no line for each."""


def _brief(name: str, look: PoolSnapshot | ContractError) -> dict[str, object]:
    if isinstance(look, PoolSnapshot):
        return {"name": name, "state": look.state, "message": ""}
    return {"name": name, "state": state_of(look), "message": str(look)}


def _means_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
