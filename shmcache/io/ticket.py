"""A handle on one operation's completion, for threads and for event loops."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, SupportsIndex

from shmcache.errors import CacheIoWorkerError
from shmcache.io.completion import Completion, Latch, Output
from shmcache.io.engine import Engine
from shmcache.states.storage import CacheIoOperationKey

if TYPE_CHECKING:
    import asyncio


class CacheIoTicket(Generic[Output]):
    """Wait for an operation or cancel it; made by a submission, copied freely.

    Contract: every waiter of an operation gets the same output object, so outputs must not be
    changed. Dropping tickets cancels nothing, and a ticket does not keep the worker's thread alive.
    Equality is identity; `shares_completion_with` compares operations.

    Concurrency: any thread, any number of times, and `await` in any asyncio event loop. Not on the
    worker's own thread (RuntimeError, where it would wait for itself), and not in a forked child.
    """

    __slots__ = ("__weakref__", "_completion", "_engine")

    def __init__(self, engine: Engine[Any, Output], completion: Completion[Output]) -> None:
        self._engine = engine
        self._completion = completion

    @property
    def key(self) -> CacheIoOperationKey:
        """Which operation it is."""
        return self._completion.key

    def wait(self, timeout: float | None = None) -> Output:
        """Block for the output, at most `timeout` seconds.

        Errors: OperationFailed, Cancelled, Poisoned: always the same answer. TimeoutError, which
        has no effect on the operation.
        """
        self._block(self._completion.resolved, timeout, "not done")
        return self._completion.answer()

    def __await__(self) -> Generator[Any, None, Output]:
        """`wait` for an event loop. A cancelled awaiter does not cancel the operation."""
        import asyncio  # it is slow to import, and whoever awaits has it

        resolved = self._completion.resolved
        if not resolved.is_open:
            self._engine.check_blocking()
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            resolved.subscribe(future, functools.partial(_wake, loop, future))
            try:
                if not resolved.is_open:
                    yield from future
            finally:
                resolved.unsubscribe(future)
        return self._completion.answer()

    def cancel(self) -> bool:
        """Cancel it unless it is finished: its waiters get `Cancelled` at once.

        True once over all tickets of the operation. A queued operation keeps its place until the
        worker reaches it, a running one runs to its end and its output is discarded.
        """
        try:
            return self._engine.cancel(self._completion)
        except CacheIoWorkerError.Poisoned:
            return False

    def wait_for_task_resources(self, timeout: float | None = None) -> None:
        """Block until the operation's task and all it holds are gone: result or not, its buffers
        may be used again. Errors: Poisoned, TimeoutError.
        """
        self._block(self._completion.released, timeout, "holding its resources")
        self._completion.check_released()

    def shares_completion_with(self, other: CacheIoTicket[Any]) -> bool:
        """Whether both are handles on one operation. Equal keys do not imply it."""
        return self._completion is other._completion

    def __repr__(self) -> str:
        return f"CacheIoTicket({self.key})"

    def __copy__(self) -> CacheIoTicket[Output]:
        return CacheIoTicket(self._engine, self._completion)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheIoTicket[Output]:
        return self.__copy__()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a CacheIoTicket belongs to its process: it cannot be pickled")

    def _block(self, latch: Latch, timeout: float | None, state: str) -> None:
        if latch.is_open:
            return
        if timeout is None:
            self._engine.check_blocking()
        self._engine.check_process()
        if not latch.wait(timeout):
            raise TimeoutError(f"operation {self.key} is still {state} after {timeout:g} s")


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits in it
        loop.call_soon_threadsafe(_finish, future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
