"""The one thread of a process that waits for capacity on behalf of all its event loops.

Why         A thousand coroutines that wait must cost neither a thousand threads nor a thousand
            sweeps; and a loop must never wait for a lock that a stopped process holds.
Contract    `add` a waiter; its future is done when its box has an answer. The thread starts with
            the first waiter, sleeps on the release counters of all their pools at once, and ends a
            second after the last has gone. Equal requests stand in one queue and are tried in the
            order in which they came; one that does not fit holds up only its equals.
Invariants  An answer is taken out of its box once: by the coroutine, or, when that has left, by
            the watcher, which gives it back.
Concurrency Queues belong to the thread. Others append to the inbox and ring.
Death       Nothing shared but the waiter bit, which a sweep clears. A forked child has no watcher
            and no waiters: its first one starts anew.
Errors      What ends an attempt (Retired, Poisoned, Closed, ...) goes to its waiter. LockHeld as
            elsewhere, after 10 s in which the lock was never free.
Cost        docs/performance.md.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

from shmcache import _core, bounds
from shmcache.errors import CachePoolError, SegmentError

if TYPE_CHECKING:
    import asyncio

_IDLE_NS = 1_000_000_000  # without waiters before the thread ends
_FRESH_SWEEP_NS = 5_000_000  # between sweeps that newcomers ask for
_BUSY_WAIT_NS = 1_000_000  # until a taken lock is tried again, at first
_BUSY_WAIT_MAX_NS = 20_000_000

_log = logging.getLogger("shmcache.watcher")

Answer = Any  # a token, or the error that ends the waiting


class Watchable(Protocol):
    """What the watcher needs of a pool."""

    def _sweep(self) -> int: ...
    def _wait_begin(self) -> int: ...
    def _wait_end(self) -> None: ...
    def _release_count(self) -> int: ...
    def _lock_held(self) -> SegmentError: ...


class Waiter:
    """One coroutine that waits; made in its loop's thread.

    `attempt` returns a token, or the refusal as a value, or None while the lock is taken. Waiters
    with equal keys share one queue: their attempts must be interchangeable.
    """

    __slots__ = ("attempt", "box", "future", "gone", "key", "looked", "loop", "number", "pool",
                 "queue", "timer")  # fmt: skip

    def __init__(
        self,
        pool: Watchable,
        key: Hashable,
        attempt: Callable[[], Answer | None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.pool = pool
        self.key = key
        self.attempt = attempt
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.box: list[Answer] = []  # the answer, taken by whoever pops it
        self.gone = False
        self.looked = False  # was tried, after a sweep that began after it came
        self.number = 0
        self.queue: _Queue | None = None

    def leave(self) -> Answer | None:
        """Nothing more is wanted: the answer, if it was there; a later one is given back."""
        self.gone = True
        return self.box.pop() if self.box else None

    def put(self, answer: Answer) -> None:
        """Answer it; a token that it does not want any more is given back here."""
        self.box.append(answer)
        if self.gone:
            with contextlib.suppress(IndexError):  # it was faster, and has it
                give_back(self.box.pop())

    def finish(self) -> None:
        """Let the coroutine go on; in its loop's thread."""
        if not self.future.done():
            self.future.set_result(None)


def give_back(answer: Answer | None) -> None:
    """Release a token; an error needs nothing."""
    if answer is not None and not isinstance(answer, BaseException):
        answer.release()


class _Queue:
    """Waiters with equal requests, in the order in which they came."""

    __slots__ = ("refusal", "waiters")

    def __init__(self) -> None:
        self.refusal: Exception | None = None  # the last
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()

    def first(self) -> Waiter:
        return next(iter(self.waiters))


class _Watched:
    """A pool for which somebody waits."""

    __slots__ = ("busy_ns", "fresh", "pool", "queues", "seen", "swept_ns", "tried_ns")

    def __init__(self, pool: Watchable) -> None:
        self.pool = pool
        self.queues: dict[Hashable, _Queue] = {}
        self.fresh = True  # somebody came after the last sweep
        self.busy_ns = 0  # for how long the lock was never free
        self.swept_ns = 0
        self.tried_ns = 0
        self.seen = pool._wait_begin()

    def add(self, waiter: Waiter) -> None:
        queue = self.queues.get(waiter.key)
        if queue is None:
            queue = self.queues[waiter.key] = _Queue()
        queue.waiters[waiter] = None
        waiter.queue = queue
        self.fresh = True

    def discard(self, waiter: Waiter) -> None:
        queue = waiter.queue
        if queue is not None and waiter in queue.waiters:
            del queue.waiters[waiter]
            if not queue.waiters:
                del self.queues[waiter.key]

    def waiters(self) -> list[Waiter]:
        return [waiter for queue in self.queues.values() for waiter in queue.waiters]

    def due_ns(self) -> int:
        """When the dead are to be looked for."""
        return self.swept_ns + (_FRESH_SWEEP_NS if self.fresh else bounds.LOCK_SLICE_NS)

    def busy_wait_ns(self) -> int:
        """Until a taken lock is tried again."""
        return min(max(self.busy_ns // 8, _BUSY_WAIT_NS), _BUSY_WAIT_MAX_NS)

    def was_busy(self) -> None:
        """Count it as `LockHeld` is counted: a process that was stopped meanwhile did not wait."""
        now_ns = time.monotonic_ns()
        if self.busy_ns:
            self.busy_ns += min(now_ns - self.tried_ns, _BUSY_WAIT_MAX_NS)
        else:
            self.busy_ns = 1
        self.tried_ns = now_ns


class Watcher:
    """The watcher of this process; see the module."""

    def __init__(self) -> None:
        self._inbox: deque[Waiter] = deque()  # newcomers, and those that left
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watched: dict[int, _Watched] = {}  # by identity: equal handles are many
        self._answered: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
        self._loops_ns = 0  # when loops were last looked at
        self._idle_ns = 0  # since when nobody waits
        self._numbers = 0

    # -- from any thread

    def add(self, waiter: Waiter) -> None:
        """Begin to wait for it. Raises HostError when no thread can be started."""
        self._inbox.append(waiter)
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="shmcache-watcher", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    raise SegmentError.HostError("clone", "EAGAIN") from None
                self._thread = thread
        _core.ring()

    def remove(self, waiter: Waiter) -> None:
        """It has left."""
        self._inbox.append(waiter)
        _core.ring()

    def has_queue(self, pool: Watchable, key: Hashable) -> bool:
        """Whether somebody waits for the same already; who comes now would overtake them."""
        watched = self._watched.get(id(pool))
        return watched is not None and key in watched.queues

    # -- the thread

    def _run(self) -> None:
        try:
            self._idle_ns = 0
            while True:
                rung = _core.rung()
                self._take_inbox()
                for watched in list(self._watched.values()):
                    self._look(watched)
                self._forget_closed_loops()
                self._tell()
                if not self._watched and self._may_end():
                    return
                self._sleep(rung)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
            _log.exception("the watcher failed")
            self._fail(error)

    def _take_inbox(self) -> None:
        while self._inbox:
            waiter = self._inbox.popleft()
            watched = self._watched.get(id(waiter.pool))
            if waiter.gone:
                if watched is not None:
                    watched.discard(waiter)
                    self._end_unless_wanted(watched)
                continue
            self._numbers += 1
            waiter.number = self._numbers
            try:
                if watched is None:
                    watched = self._watched[id(waiter.pool)] = _Watched(waiter.pool)
                watched.add(waiter)
            except (SegmentError, CachePoolError) as error:
                self._answer(waiter, _again(error))

    def _end_unless_wanted(self, watched: _Watched) -> None:
        if not watched.queues and self._watched.pop(id(watched.pool), None) is not None:
            watched.pool._wait_end()

    def _look(self, watched: _Watched) -> None:
        """Try what waits for this pool, if anything can have changed; sweep when that is due."""
        try:
            seen = watched.pool._release_count()
            due = time.monotonic_ns() >= watched.due_ns()
            if seen != watched.seen or watched.fresh or watched.busy_ns or due:
                watched.seen = seen  # read before the attempts: a release during them is seen
                free = self._attempt(watched)
                if free and due and watched.queues:
                    self._sweep(watched)
                elif not free and watched.busy_ns >= bounds.LOCK_DEADLINE_NS:
                    raise watched.pool._lock_held()
                elif not free and watched.fresh:
                    for waiter in watched.waiters():
                        waiter.looked = True
        except (SegmentError, CachePoolError) as error:
            for waiter in watched.waiters():
                self._answer(waiter, _again(error))
                watched.discard(waiter)
        self._end_unless_wanted(watched)

    def _sweep(self, watched: _Watched) -> None:
        watched.fresh = False
        watched.swept_ns = time.monotonic_ns()
        if watched.pool._sweep():
            self._attempt(watched)
        for waiter in watched.waiters():
            waiter.looked = True

    def _attempt(self, watched: _Watched) -> bool:
        """Try the first of each queue, the oldest first, until each is refused; False: lock taken.

        A queue whose first was refused waits for the next release.
        """
        heap = [(queue.first().number, queue) for queue in watched.queues.values()]
        heapq.heapify(heap)  # by number: no two are equal
        while heap:
            queue = heapq.heappop(heap)[1]
            waiter = queue.first()
            refused = False
            try:
                answer = waiter.attempt()
                refused = isinstance(answer, Exception)
            except Exception as error:  # noqa: BLE001 - it is told to who waits
                answer = error.with_traceback(None)
            if answer is None:
                watched.was_busy()
                return False
            watched.busy_ns = 0
            if refused:
                queue.refusal = answer
                continue
            self._answer(waiter, answer)
            watched.discard(waiter)
            if queue.waiters:
                heapq.heappush(heap, (queue.first().number, queue))
        return True

    def _answer(self, waiter: Waiter, answer: Answer) -> None:
        waiter.put(answer)
        self._answered.setdefault(waiter.loop, []).append(waiter)

    def _tell(self) -> None:
        """Wake the loops, each once."""
        while self._answered:
            loop, waiters = self._answered.popitem()
            try:
                loop.call_soon_threadsafe(_finish_all, waiters)
            except RuntimeError:  # the loop is closed: nobody will take it
                for waiter in waiters:
                    give_back(waiter.leave())

    def _forget_closed_loops(self) -> None:
        """A loop that was closed before its coroutines ended: they will never leave."""
        now_ns = time.monotonic_ns()
        if now_ns - self._loops_ns < bounds.LOCK_SLICE_NS:
            return
        self._loops_ns = now_ns
        for watched in list(self._watched.values()):
            for waiter in watched.waiters():
                if waiter.loop.is_closed():
                    waiter.gone = True
                    watched.discard(waiter)
            self._end_unless_wanted(watched)

    def _sleep(self, rung: int) -> None:
        now_ns = time.monotonic_ns()
        wait_ns = bounds.LOCK_SLICE_NS if self._watched else _IDLE_NS
        for watched in self._watched.values():
            left_ns = watched.busy_wait_ns() if watched.busy_ns else watched.due_ns() - now_ns
            wait_ns = min(wait_ns, max(left_ns, 0))
        pools = [watched.pool for watched in self._watched.values()]
        seen = [watched.seen for watched in self._watched.values()]
        _core.sleep_until_release(pools, seen, rung, wait_ns)

    def _may_end(self) -> bool:
        now_ns = time.monotonic_ns()
        self._idle_ns = self._idle_ns or now_ns
        with self._starting:
            if self._inbox:
                self._idle_ns = 0
            elif now_ns - self._idle_ns >= _IDLE_NS:
                self._thread = None
                return True
        return False

    def _fail(self, error: Exception) -> None:
        """Nobody may wait for a thread that is gone."""
        with self._starting:
            self._thread = None
            waiters = list(self._inbox)
            self._inbox.clear()
        for watched in self._watched.values():
            waiters += watched.waiters()
            with contextlib.suppress(SegmentError, CachePoolError):
                watched.pool._wait_end()
        self._watched.clear()
        for waiter in waiters:
            self._answer(waiter, RuntimeError(f"the watcher failed: {error!r}"))
        self._tell()


def _finish_all(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        waiter.finish()


def _again(error: Exception) -> Exception:
    """The error for one more who waits: a raised one keeps the frames that it came through."""
    return copy.copy(error).with_traceback(None)


_watcher = Watcher()


def this_process() -> Watcher:
    """The watcher of this process."""
    return _watcher


def _renew() -> None:
    global _watcher
    _watcher = Watcher()


os.register_at_fork(after_in_child=_renew)
