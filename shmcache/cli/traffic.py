"""The trace and the model that a command is told of: files, pipes, names."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import click

from shmcache.workloads.geometries import Geometry, geometry, geometry_names
from shmcache.workloads.traces import TraceReader, open_trace

_STANDARD_INPUT: Final = "-"
_CHECK_S: Final = 0.2


def named_geometry(name: str, param_hint: str) -> Geometry:
    """The built-in geometry of this name; an unknown one is a wrong command line."""
    try:
        return geometry(name)
    except KeyError:
        raise click.BadParameter(
            f"{name!r} is none of {', '.join(geometry_names())}", param_hint=param_hint
        ) from None


@contextlib.contextmanager
def trace_reader(
    trace: str, block_tokens: int, check: Callable[[], None] = lambda: None
) -> Iterator[TraceReader]:
    """The requests of a file, or of standard input as "-", which may stay silent for long.

    `check` is called meanwhile, and may raise.
    """
    if trace == _STANDARD_INPUT:
        stream = io.BufferedReader(_Interruptible(sys.stdin.fileno(), check))
        yield TraceReader(stream, "standard input", block_tokens=block_tokens)
    else:
        with open_trace(trace, block_tokens=block_tokens) as reader:
            yield reader


class _Interruptible(io.RawIOBase):
    def __init__(self, descriptor: int, check: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._check = check

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not select.select([self._descriptor], [], [], _CHECK_S)[0]:
            self._check()
        return os.readv(self._descriptor, [buffer])
