"""Copies that are finished by whoever waits for them first: what all backends share.

Why: an engine only knows how its arrays are copied. That all waiters get one answer, that a copy
lets go of its source when it is done, and that tests can hold it up or break it, is the same for
each.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.session.backend import HostArray, HostCopy

T = TypeVar("T")
A = TypeVar("A")

CopyHook = Callable[[CacheTier, CacheBlockId], None]


def unhindered(to: CacheTier, block_id: CacheBlockId) -> None:
    """The hook of a backend that has none."""


class CopyingBackend(Generic[A]):
    """The half of a `CacheBackend` that moves blocks; a subclass says how arrays are copied.

    The hook, `on_copy(to, block_id)`, is called before a copy is finished, by who finishes it.
    """

    def __init__(self, *, reads_host: bool = False, on_copy: CopyHook = unhindered) -> None:
        self._reads_host = reads_host
        self._on_copy = on_copy

    @property
    def reads_host(self) -> bool:
        """Whether a lease of a host copy promotes nothing."""
        return self._reads_host

    def copy_to_host(
        self, block_id: CacheBlockId, operation_id: int, arrays: tuple[A, ...], host: HostCopy
    ) -> HostCopyOnce:
        """Start the copy; `wait` finishes it."""
        finish = self._start_to_host(arrays, host.arrays)

        def done() -> HostCopy:
            self._on_copy(CacheTier.HOST, block_id)
            finish()
            return host

        return HostCopyOnce(block_id, operation_id, done)

    def copy_to_device(self, block_id: CacheBlockId, host: HostCopy) -> Once[tuple[A, ...]]:
        """Start the copy; `wait` finishes it."""
        finish = self._start_to_device(host.arrays)

        def done() -> tuple[A, ...]:
            self._on_copy(CacheTier.DEVICE, block_id)
            return finish()

        return Once(done)

    def _start_to_host(
        self, sources: Sequence[A], targets: Sequence[HostArray]
    ) -> Callable[[], None]:
        """Start copying, if that needs no waiting; what is called to finish it."""
        raise NotImplementedError

    def _start_to_device(self, sources: Sequence[HostArray]) -> Callable[[], tuple[A, ...]]:
        """Likewise; the arrays may be read-only."""
        raise NotImplementedError


class Once(Generic[T]):
    """A call that the first waiter makes and all get the answer of.

    An exception that only ends the waiting thread (Ctrl-C) leaves the call to the next waiter.
    An error is raised as a copy: a raised one keeps the frames that it came through, and with them
    the arrays, as long as it is kept itself.
    """

    __slots__ = ("_answer", "_call", "_lock")

    def __init__(self, call: Callable[[], T]) -> None:
        self._lock = threading.Lock()
        self._call: Callable[[], T] | None = call
        self._answer: T | Exception | None = None

    def wait(self) -> T:
        """The answer, or the error again."""
        with self._lock:
            if self._call is not None:
                try:
                    self._answer = self._call()
                except Exception as error:  # noqa: BLE001 (all who wait are told)
                    traceback.clear_frames(error.__traceback__)
                    self._answer = error.with_traceback(None)
                self._call = None  # and with it the source arrays
            answer: Any = self._answer
        if isinstance(answer, Exception):
            raise copy.copy(answer)
        return answer  # type: ignore[no-any-return]


class HostCopyOnce(Once[HostCopy]):
    """A copy to the host (`HostCopyOperation`)."""

    __slots__ = ("block_id", "operation_id")

    def __init__(
        self, block_id: CacheBlockId, operation_id: int, call: Callable[[], HostCopy]
    ) -> None:
        super().__init__(call)
        self.block_id = block_id
        self.operation_id = operation_id
