"""`shmcache export`: serve metrics, snapshots and a page of pools until told to stop."""

from __future__ import annotations

import ipaddress
import re
import signal
import threading

import click

from shmcache.cli.answers import Answer, Command, emit
from shmcache.cli.names import POOL_NAME
from shmcache.errors import SegmentError, WorkloadError


@click.command(cls=Command)
@click.argument("names", metavar="[NAME]...", type=POOL_NAME, nargs=-1)
@click.option(
    "--listen",
    default="127.0.0.1:9469",
    show_default=True,
    help="Address and port; port 0: a free one. Only what is given here is listened on.",
)
@click.option("--no-owners", is_flag=True, help="Leave out the metrics of each owner's slot.")
def export(names: tuple[str, ...], listen: str, no_owners: bool) -> None:
    """Serve Prometheus metrics, snapshots as JSON, and a page to look at, until stopped.

    Of the named pools; without a name, of every pool of this host. Pools may come and go. Takes no
    slot in them and connects to nobody. Whoever can reach the address reads process ids and command
    lines: keep it on this host, or behind something that asks who is there.

    \b
    Example:
      shmcache export llm --listen 127.0.0.1:9469
    """
    host, port = _address(listen)
    try:
        from shmcache.integrations.server import ExportServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        install = "pip install 'shmcache[export]'"
        raise WorkloadError.PackageMissing("prometheus-client", install) from None
    try:
        server = ExportServer(host, port, *names, owners=not no_owners)
    except OSError as error:
        raise SegmentError.HostError.of(f"listening on {listen}", error) from error
    with server:
        _stop_at_signals(server)
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{server.server_port}"
        text = f"serving {url}/ (a page), {url}/metrics, {url}/api/pools"
        emit(Answer({"event": "serving", "url": url, "pools": list(names)}, (text,)))
        server.serve_forever(poll_interval=0.2)


def _stop_at_signals(server: object) -> None:
    def stop(number: int, frame: object) -> None:
        # Not here: shutdown() waits for the loop that this handler interrupted.
        threading.Thread(target=server.shutdown, daemon=True).start()  # type: ignore[attr-defined]

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _address(listen: str) -> tuple[str, int]:
    """A numeric address: looking up a name would ask somebody."""
    match = re.fullmatch(r"\[?(?P<host>[0-9a-fA-F.:]+?)\]?:(?P<port>[0-9]{1,5})", listen)
    try:
        if match is None:
            raise ValueError("write ADDRESS:PORT, as 127.0.0.1:9469 or [::1]:9469")
        host, port = str(ipaddress.ip_address(match["host"])), int(match["port"])
        if port > 65535:
            raise ValueError(f"there is no port {port}")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from None
    return host, port
