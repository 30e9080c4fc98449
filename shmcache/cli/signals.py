"""Ctrl-C in commands that run children: noticed where everything can be taken away in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM raise at the next check, where all clean-up follows; a second at once."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
