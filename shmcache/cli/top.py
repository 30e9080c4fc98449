"""`shmcache top`: a pool as it is now, until told to stop.

Contract    Draws only what the last look said: a pool that cannot be looked at has no figures,
            and a new epoch under the name is followed. q, Ctrl-C, SIGTERM and SIGHUP end it with
            exit code 0 and give the terminal back as it was.
Death       SIGKILL leaves the terminal as every full-screen program does: `reset`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator

import click
from rich.console import Console, Group
from rich.live import Live

from shmcache import PoolSnapshot, PoolWatcher
from shmcache.cli.answers import Answer, Command, json_asked
from shmcache.cli.frame import ORDERS, View, frame
from shmcache.cli.names import pool_argument
from shmcache.cli.sizes import FiniteRange
from shmcache.errors import ContractError
from shmcache.integrations.watched import state_of

_FIRST_S = 0.2  # so that the first rates do not wait for a whole turn


@click.command(cls=Command)
@pool_argument
@click.option(
    "--interval",
    type=FiniteRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print one frame and end. --json does so too.")
def top(name: str, interval: float, once: bool) -> Answer | None:
    """Watch a pool in the terminal: budget, rates, slabs, owners, managers.

    Keys: s the next order of the owners, r give back what dead owners held, q quit. Follows the
    name to a new epoch. Takes no slot.

    \b
    Example:
      shmcache top llm
    """
    if once or json_asked():
        return _once(name, interval)
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise click.UsageError("top needs a terminal; --once prints one frame")
    with PoolWatcher(name) as watcher:
        watcher.look()  # a wrong name is an error here, not a picture
        with contextlib.suppress(KeyboardInterrupt), _signals() as woken, _keys() as keys:
            _Screen(watcher, interval, woken, keys).run()
    return None


def _once(name: str, interval: float) -> Answer:
    columns, lines = shutil.get_terminal_size()
    with PoolWatcher(name) as watcher:
        before = watcher.look()
        select.select([], [], [], min(interval, _FIRST_S))
        taken = watcher.look()
    text = frame(View(name, taken, before), columns, lines)[:-1]  # there are no keys
    while text and not text[-1].plain:
        text.pop()
    return Answer({"snapshot": taken}, tuple(text))


class _Screen:
    def __init__(self, watcher: PoolWatcher, interval: float, woken: int, keys: int) -> None:
        self._watcher = watcher
        self._interval = interval
        self._woken, self._keys = woken, keys
        self._view = View(watcher.name, None)

    def run(self) -> None:
        """Until q."""
        console = Console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            pause = _FIRST_S
            while True:
                self._look()
                self._draw(live, console)
                if not self._serve_keys(live, console, pause):
                    return
                pause = self._interval

    def _look(self) -> None:
        old = self._view
        try:
            taken: PoolSnapshot | None = self._watcher.look()
            self._view = old._replace(taken=taken, before=old.taken, state="active")
        except ContractError as error:
            state = state_of(error)
            self._view = View(old.name, None, None, state, str(error), old.order)

    def _draw(self, live: Live, console: Console) -> None:
        columns, lines = shutil.get_terminal_size()
        console.size = (columns, lines)
        live.update(Group(*frame(self._view, columns, lines)), refresh=True)

    def _serve_keys(self, live: Live, console: Console, pause: float) -> bool:
        """Wait for the next look; False when asked to quit."""
        ready, _, _ = select.select([self._keys, self._woken], [], [], pause)
        if self._woken in ready:  # another size: the same figures
            os.read(self._woken, 4096)
            self._draw(live, console)
        if self._keys not in ready:
            return True
        typed = os.read(self._keys, 64).decode(errors="replace")
        if not typed or "q" in typed:
            return False
        if "s" in typed:
            following = ORDERS[(ORDERS.index(self._view.order) + 1) % len(ORDERS)]
            self._view = self._view._replace(order=following)
        if "r" in typed:
            self._reclaim()
        return True

    def _reclaim(self) -> None:
        try:
            swept = self._watcher.sweep()
        except ContractError as error:
            self._view = self._view._replace(message=str(error))
            return
        pids = ", ".join(str(owner.pid) for owner in swept)
        said = f"gave back what {pids} held" if pids else "nothing to reclaim"
        self._view = self._view._replace(message=said)


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Standard input key by key, unechoed, without Ctrl-Z, which would leave the screen behind."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        present = termios.tcgetattr(descriptor)
        present[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSANOW, present)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Asked to end: KeyboardInterrupt. The descriptor is readable after a change of the size."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def resized(number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, b".")

    wanted = {signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGINT: end, signal.SIGWINCH: resized}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
