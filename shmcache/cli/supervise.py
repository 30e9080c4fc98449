"""`shmcache supervise`: watch one pool until told to stop, and say what was given back.

Contract    SIGTERM and SIGINT end it with exit code 0. It also ends when the pool is removed, with
            1: a service manager then starts it again, and it says that there is no such pool.
Death       Leaves nothing behind, may be killed and started again at any time, any number may run.
"""

from __future__ import annotations

import logging
import signal
from typing import Literal

import click

from shmcache import (
    CachePoolResource,
    CacheResidencyPool,
    ReclaimedOwner,
    SegmentError,
    Supervisor,
    SupervisorEvent,
)
from shmcache.cli.answers import Answer, Command, emit
from shmcache.cli.names import hex_id, pool_argument
from shmcache.cli.pools import reclaimed_document
from shmcache.cli.sizes import format_size


@click.command(cls=Command)
@pool_argument
@click.option(
    "--on-poison",
    type=click.Choice(["report", "recreate"]),
    default="report",
    show_default=True,
    help="What to do when validation failed: say so, or start an empty pool under the name.",
)
def supervise(name: str, on_poison: Literal["report", "recreate"]) -> None:
    """Give back what dead processes held, until stopped.

    Takes milliseconds from a death. Ends at SIGTERM or Ctrl-C, and when the pool is removed. One
    line for each thing that happened; with --json one object each. Needs the user and the PID
    namespace of the pool's processes, and no other privilege.

    \b
    Example:
      shmcache supervise llm --on-poison=recreate
    """
    logging.getLogger("shmcache.supervisor").addHandler(logging.NullHandler())  # we print it
    asked_to_stop: list[int] = []

    def stop(number: int, frame: object) -> None:
        asked_to_stop.append(number)
        supervisor.stop()

    with CacheResidencyPool.observe(name) as pool:
        supervisor = Supervisor(pool, on_poison=on_poison, on_event=_show)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        watching = f"watching pool {name!r}, id {hex_id(pool.id)}"
        emit(Answer({"event": "watching", "detail": watching, "owners": []}, (watching,)))
        supervisor.run()
    if not asked_to_stop:
        raise SegmentError.Retired(name)


def _show(event: SupervisorEvent) -> None:
    owners = reclaimed_document(event.owners)
    document = {"event": event.kind, "detail": event.detail, "owners": owners}
    emit(Answer(document, (_line(event),)))


def _line(event: SupervisorEvent) -> str:
    held = "; ".join(filter(None, map(_held, event.owners)))
    return f"{event.detail}: {held}" if held else event.detail


def _held(owner: ReclaimedOwner) -> str:
    axes = [resource.value for resource in CachePoolResource]
    held = {axis: getattr(owner.usage, f"{axis}_bytes") for axis in axes}
    return ", ".join(f"{axis.replace('_', ' ')} {format_size(n)}" for axis, n in held.items() if n)
