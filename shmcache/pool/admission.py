"""Waiting for capacity in an event loop: what `reserve_async` and its like return.

Why         A coroutine that waits must not keep its loop from running, and may be cancelled at any
            moment, also at that of its admission.
Contract    An `Admission` is a coroutine: await it, make a task of it, or enter it with
            `async with`, which gives back at the end. Cancelled, timed out, or never finished: what
            was admitted for it is given back, and nobody waits for it any more.
Concurrency Any loop of any thread; each is awaited once, as any coroutine.
Death       As of a thread that waits: nothing is left but a bit that a sweep clears.
Not here    Who tries, and when: watcher.py.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Coroutine, Generator, Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shmcache import bounds
from shmcache.pool import watcher
from shmcache.pool.watcher import Waiter, Watchable, give_back

if TYPE_CHECKING:
    from types import TracebackType

_LOOK_SECONDS = 0.005  # an end of time before the first look waits for it in such steps


class Held(Protocol):
    """What can be admitted."""

    def release(self) -> None:
        """Give it back."""


_H = TypeVar("_H", bound=Held | None)


class Admission(Coroutine[Any, Any, _H]):
    """A token or block that is waited for: `await` it, or `async with`, which releases at the end.

    Contract: a coroutine in all respects. What it raises is said where it is made. Once cancelled,
    or left in any other way, it holds nothing.
    """

    __slots__ = ("_coroutine", "_held")

    def __init__(self, coroutine: Coroutine[Any, Any, _H]) -> None:
        self._coroutine = coroutine
        self._held: _H | None = None

    def __await__(self) -> Generator[Any, Any, _H]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> _H:
        self._held = await self._coroutine
        return self._held

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._held is not None:
            self._held.release()

    def send(self, value: Any, /) -> Any:
        """As of any coroutine."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """As of any coroutine."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """As of any coroutine: what was waited for is not wanted any more."""
        self._coroutine.close()


async def admitted(
    pool: Watchable,
    key: Hashable,
    attempt: Callable[[], Any],
    until_ns: int,
    *,
    named: Callable[[Any], Exception] = copy.copy,
) -> Any:
    """What `attempt` answers in the end. After the time: the last refusal, as `named` gives it.

    An attempt answers a token, a refusal as a value, or None while the lock is taken. It is made
    here once, unless others wait for the same, and from then on by the watcher.
    """
    import asyncio  # it is slow to import, and whoever awaits has it

    ours = watcher.this_process()
    refusal: Exception | None = None
    if not ours.has_queue(pool, key):
        answer = attempt()
        if answer is not None and not isinstance(answer, Exception):
            return answer
        refusal = answer
    waiter = Waiter(pool, key, attempt, asyncio.get_running_loop())
    try:
        ours.add(waiter)
        if until_ns != bounds.U64_MAX:
            _expire_at(waiter, until_ns)
        await waiter.future
    except BaseException:
        give_back(waiter.leave())
        ours.remove(waiter)
        raise
    finally:
        if waiter.timer is not None:
            waiter.timer.cancel()
    answer = waiter.leave()
    if answer is None:
        ours.remove(waiter)
        last = waiter.queue.refusal if waiter.queue is not None else None
        raise named(last or refusal or pool._lock_held())
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _expire_at(waiter: Waiter, until_ns: int) -> None:
    """End the waiting then, but not before the dead were looked for."""
    left_s = (until_ns - time.monotonic_ns()) / 1e9
    if left_s <= 0 and waiter.looked:
        waiter.finish()
    else:
        waiter.timer = waiter.loop.call_later(
            max(left_s, _LOOK_SECONDS), _expire_at, waiter, until_ns
        )
