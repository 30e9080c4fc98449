"""Wait for what another process will give back.

Why         A refusal now may be an admission in a moment; polling would burn a core, and a wake-up
            that is lost with its sender must not hang anyone.
Contract    One loop for reservations, blocks and claims: try; reclaim the dead and try again; then
            sleep until something is released, at most a slice at a time, and look anew.
Death       A killed releaser costs the rest of a slice; a killed waiter costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from shmcache import bounds

_T = TypeVar("_T")


class Waitable(Protocol):
    """What the loop needs of a pool."""

    def _sweep(self) -> int: ...
    def _wait_begin(self) -> int: ...
    def _wait_release(self, seen: int, wait_ns: int) -> int: ...
    def _wait_end(self) -> None: ...


def deadline_ns(timeout: float | None) -> int:
    """When `timeout` seconds are over: 0 for "at once", a time that never comes for None."""
    if timeout is None:
        return bounds.U64_MAX
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be seconds or None, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise ValueError(f"timeout must not be negative, unlike {timeout}")
    if timeout == 0:
        return 0
    return time.monotonic_ns() + int(min(timeout, 1e9) * 1e9)


def patiently(
    pool: Waitable, attempt: Callable[[], _T | None], until_ns: int, *, hopeless: bool = False
) -> _T | None:
    """What `attempt` returns once it is not None; None when the time is over.

    The first attempt was made by the caller. With `hopeless`, only the dead are waited for.
    """
    if pool._sweep() and (answer := attempt()) is not None:
        return answer
    if until_ns == 0 or hopeless:
        return None
    seen = pool._wait_begin()
    try:
        while True:
            if (answer := attempt()) is not None:
                return answer
            left_ns = until_ns - time.monotonic_ns()
            if left_ns <= 0:
                return None
            seen = pool._wait_release(seen, min(left_ns, bounds.LOCK_SLICE_NS))
            pool._sweep()
    finally:
        pool._wait_end()
