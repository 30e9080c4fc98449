"""A signal handler that raises, wherever one can run: nothing hangs, and closing gives all back.

Python runs a handler when a call returns and when a function begins. A profile function is called
at the same moments and may raise there, so each moment of a scenario can be tried by its number;
real signals try the moments that no profiler sees.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shmcache import CachePoolLimits, CacheResidencyError, CacheResidencyPool
from shmcache._core import Attempt
from shmcache.errors import ContractError
from shmcache.session.locking import SessionLock
from shmcache.session.session import CacheSession
from tests.session.rig import content, grow
from tests.session.test_sharing import BLOCK, IDS, TWO_FULL, session

SAMPLE = 150


@pytest.fixture(autouse=True)
def finalizers_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is interrupted is told of, with a traceback that would keep its objects alive."""
    monkeypatch.setattr(sys, "unraisablehook", lambda told: None)


class Interruption(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


def interrupted_at(moment: int, scenario: Callable[[], object]) -> bool:
    """Raise at that moment of the scenario; whether it had so many."""
    moments = itertools.count()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and next(moments) == moment:
            raise Interruption

    sys.setprofile(profile)
    try:
        scenario()
    except Interruption:
        return True
    finally:
        sys.setprofile(None)
    return next(moments) > moment


def work(cache: CacheSession) -> None:
    """All that a session's thread does: match, feed, append, seal, publish, read, cut, clear."""
    found = cache.match(IDS[:10])
    cache.feed(IDS[:10])
    for start in range(found, 10, BLOCK):
        for layer in (0, 1):
            grow(cache, min(BLOCK, 10 - start), layer=layer)
    with cache.lease(cache.blocks(0)[0]) as lease:
        assert lease.arrays
    assert content(cache) == list(range(10))
    for layer in (0, 1):
        cache.truncate(layer, 6)
    cache.clear()


def pool_for_work() -> CacheResidencyPool:
    limits = CachePoolLimits(1 << 20, 8 << 20, 1 << 20, 1 << 20)
    return CacheResidencyPool(limits, arena_bytes=2 << 20, blocks_max=64)


def assert_usable_and_gives_back(pool: CacheResidencyPool, cache: CacheSession) -> None:
    """From another thread, which would wait for a lock that was left taken.

    What was being read when the handler raised may stay leased until the session closes.
    """
    errors: list[BaseException] = []

    def use() -> None:
        try:
            with contextlib.suppress(CacheResidencyError.Lifecycle):
                cache.clear()
                work(cache)
            cache.close()
        except BaseException as error:  # noqa: BLE001 (told by the main thread)
            errors.append(error)

    user = threading.Thread(target=use, daemon=True)
    user.start()
    user.join(20)
    assert not user.is_alive(), "it waits for ever"
    assert errors == []
    usage, arena = pool.report(), pool.arena_report()
    assert (arena.leased_bytes, arena.private_bytes) == (0, 0)
    assert usage.current_host_bytes == arena.published_bytes
    assert usage.current_device_bytes == usage.current_transfer_in_flight_bytes == 0
    assert pool.verify().ok


def try_moment(moment: int, publish: str) -> bool:
    with pool_for_work() as pool:
        cache = session(pool, TWO_FULL, publish=publish)
        had = interrupted_at(moment, lambda: work(cache))
        assert_usable_and_gives_back(pool, cache)
    return had


def moments_of_work(publish: str) -> int:
    """How many there are, by halving."""
    low, high = 0, 1 << 16
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if try_moment(middle, publish) else (low, middle)
    return low


@pytest.mark.parametrize("publish", ["on_seal", "on_demote"])
def test_a_handler_may_raise_at_any_moment(publish: str, seed: int) -> None:
    for moment in random.Random(seed).sample(range(moments_of_work(publish)), SAMPLE):
        try_moment(moment, publish)


@pytest.mark.ci
@pytest.mark.watchdog(900)
@pytest.mark.parametrize("publish", ["on_seal", "on_demote"])
def test_a_handler_may_raise_at_every_moment(publish: str) -> None:
    for moment in itertools.count():
        if not try_moment(moment, publish):
            break
    assert moment > 500


@pytest.mark.parametrize("period_s", [0.0002, 0.001])
def test_real_signals(period_s: float) -> None:
    """What a profiler does not see: the moments around `with` itself."""
    armed = stop = False

    def handler(number: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interruption

    def disturb(thread: int) -> None:
        while not stop:
            signal.pthread_kill(thread, signal.SIGVTALRM)
            paused.wait(period_s)

    paused, interruptions = threading.Event(), 0
    before = signal.signal(signal.SIGVTALRM, handler)
    disturber = threading.Thread(target=disturb, args=(threading.get_ident(),))
    disturber.start()
    with pool_for_work() as pool:
        cache = session(pool, TWO_FULL)
        try:
            while interruptions < 200:
                try:
                    armed = True
                    work(cache)
                    cache.clear()
                    armed = False
                except Interruption:
                    interruptions += 1
                except (ContractError, AssertionError, ValueError, IndexError):
                    armed = False  # what an interruption left is not what the scenario expects
                    with contextlib.suppress(CacheResidencyError.Lifecycle):
                        cache.clear()
        finally:
            armed, stop = False, True
            disturber.join()
            signal.signal(signal.SIGVTALRM, before)
        assert_usable_and_gives_back(pool, cache)


class PythonLock(SessionLock):
    """A mutant: the lock is taken and left in Python, as an ordinary context manager does."""

    def __enter__(self) -> None:
        entered = super().__enter__()
        _ = len("a moment")
        return entered


def test_a_lock_taken_in_python_is_left_taken() -> None:
    """The mutant is caught: some moment leaves its lock taken, and none that of the real one."""

    def left_taken(kind: type[SessionLock]) -> bool:
        for moment in range(12):
            lock = kind(lambda: None)

            def section(lock: SessionLock = lock) -> None:
                with lock:
                    len("")

            interrupted_at(moment, section)
            ran: list[int] = []
            lock.later(lambda ran=ran: ran.append(1))  # type: ignore[misc]
            if not ran:
                return True
        return False

    assert left_taken(PythonLock)
    assert not left_taken(SessionLock)


def test_an_attempt_never_waits() -> None:
    lock = threading.Lock()
    with Attempt(lock) as first, Attempt(lock) as second:
        assert (first, second) == (True, False)
    assert not lock.locked()
