"""Make the n-th call of a function of `os` fail, in this process.

with failing("fsync", nth=2, number=errno.EIO) as fault:
    ...
assert fault.happened
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

Call = Callable[..., Any]


class Fault:
    """Counts the calls of one function, and says whether the one in question came."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.calls = 0

    @property
    def happened(self) -> bool:
        """Whether the n-th call was made."""
        return self.calls > self.nth


@contextlib.contextmanager
def instead(name: str, nth: int, act: Callable[[Call, tuple[Any, ...]], Any]) -> Iterator[Fault]:
    """Do `act(real, arguments)` instead of the n-th call (from 0) of `os.<name>`."""
    real, fault = getattr(os, name), Fault(nth)

    def call(*arguments: Any, **more: Any) -> Any:
        fault.calls += 1
        if fault.calls == nth + 1:
            return act(lambda *changed: real(*changed, **more), arguments)
        return real(*arguments, **more)

    setattr(os, name, call)
    try:
        yield fault
    finally:
        setattr(os, name, real)


def failing(name: str, nth: int, number: int) -> contextlib.AbstractContextManager[Fault]:
    """The n-th call fails with this errno. A failing `close` has closed, as on Linux."""

    def fail(real: Call, arguments: tuple[Any, ...]) -> None:
        if name == "close":
            real(*arguments)
        raise OSError(number, os.strerror(number))

    return instead(name, nth, fail)
