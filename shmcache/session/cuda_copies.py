"""When a copy between host and device runs: at once on a stream, or when somebody waits for it.

Why: a copy from or to pinned memory runs beside the attention of other layers; then it must be
ordered by hand: after the work that made its source, and before its memory is used again. Memory
that is not pinned is copied when somebody waits: else CUDA makes the starter wait, who has the
session's lock.

Contract: nothing here imports torch; what is used of `torch.cuda` is `Stream`, `stream`,
`current_stream`, `Event` and `cudart`, so that tests can stand in for it.

Death: a killed process is no longer scheduled nor mapped when its death can be seen, and the driver
has ended its copies by then: it closes the device first. Reasoned, not tried.

Source: the CUDA half was written without a GPU at hand and has only run against a stand-in.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

_log = logging.getLogger(__name__)

_REGISTER_PORTABLE: Final = 1
_REGISTER_READ_ONLY: Final = 8


class PlainCopies:
    """Copies made by whoever waits: all that a CPU needs."""

    def follow(self) -> None:
        """Later copies see what the caller's stream has written by now."""

    def pin(self, fileno: int) -> bool:
        """Register a file's mappings; whether all of them are."""
        return False

    def to_host(self, targets: Sequence[Any], sources: Sequence[Any]) -> Callable[[], None]:
        """Copy; what is called to finish."""
        return lambda: _copy(targets, sources)

    def to_device(self, targets: Sequence[Any], sources: Sequence[Any]) -> Callable[[], None]:
        """Likewise."""
        return lambda: _copy(targets, sources)


class CudaCopies(PlainCopies):
    """Copies on two streams, one for each direction (see the module). `cuda` is `torch.cuda`."""

    def __init__(self, cuda: Any, device: Any) -> None:
        self._cuda = cuda
        self._device = device
        self._out = cuda.Stream(device)
        self._in = cuda.Stream(device)
        self._pinned: list[int] = []
        weakref.finalize(self, _unregister, cuda, self._pinned).atexit = False

    def follow(self) -> None:
        """See `PlainCopies`; whoever evicts may be another thread, with another stream."""
        self._out.wait_stream(self._cuda.current_stream(self._device))

    def pin(self, fileno: int) -> bool:
        """Register every mapping of the file, those without write permission as read-only."""
        runtime = self._cuda.cudart()
        for start, end, writable in mappings(fileno):
            flags = _REGISTER_PORTABLE | (0 if writable else _REGISTER_READ_ONLY)
            refused = int(runtime.cudaHostRegister(start, end - start, flags))
            if refused:
                _log.warning("CUDA does not pin %d bytes: error %d", end - start, refused)
                return False
            self._pinned.append(start)
        return True

    def to_host(self, targets: Sequence[Any], sources: Sequence[Any]) -> Callable[[], None]:
        """At once, if the targets are pinned."""
        self.follow()  # sources that an engine made itself
        return self._run(self._out, targets, sources, targets)

    def to_device(self, targets: Sequence[Any], sources: Sequence[Any]) -> Callable[[], None]:
        """At once, if the sources are pinned."""
        # The targets may be memory that the caller's stream was the last to use.
        self._in.wait_stream(self._cuda.current_stream(self._device))
        return self._run(self._in, targets, sources, sources)

    def _run(
        self, stream: Any, targets: Sequence[Any], sources: Sequence[Any], host: Sequence[Any]
    ) -> Callable[[], None]:
        def start() -> _Running:
            return _Running(self, self._cuda, stream, (targets, sources))

        if all(each.is_pinned() for each in host):
            return start().finish
        return lambda: start().finish()


class _Running:
    """A copy under way: it keeps both memories until it is over, also if nobody waits for it.

    Why a finalizer waits here: the memory must not be anybody else's before, and the wait is
    bounded by the work that the copy was queued behind.
    """

    def __init__(
        self,
        copies: CudaCopies,
        cuda: Any,
        stream: Any,
        memory: tuple[Sequence[Any], Sequence[Any]],
    ) -> None:
        self._kept = copies, memory  # the first, because its end takes the pins away
        self._event = cuda.Event()
        try:
            with cuda.stream(stream):
                _copy(*memory, non_blocking=True)
        finally:
            self._event.record(stream)

    def finish(self) -> None:
        """Wait until it is over."""
        self._event.synchronize()

    __del__ = finish


def mappings(fileno: int) -> list[tuple[int, int, bool]]:
    """Where this process has mapped a file: start, end, and whether it may be written."""
    known = os.fstat(fileno)
    device = f"{os.major(known.st_dev):02x}:{os.minor(known.st_dev):02x}"
    found = []
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            span, rights, _, at, inode, *_ = line.split()
            if (at, int(inode)) == (device, known.st_ino):
                start, end = (int(text, 16) for text in span.split("-"))
                found.append((start, end, "w" in rights))
    return found


def _copy(targets: Sequence[Any], sources: Sequence[Any], *, non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def _unregister(cuda: Any, pinned: Sequence[int]) -> None:
    for address in pinned:
        cuda.cudart().cudaHostUnregister(address)
