"""Calls and finalizers while a stopped process holds the pool's lock (P10, second half).

The holder is a worker that maps the segment and takes the robust mutex itself, then is stopped: as
a process that was frozen inside a call of the engine.
"""

import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shmcache import CachePoolLimits, CachePoolUsage, CacheResidencyPool, SegmentError, _core
from shmcache.pool.names import segment_path
from tests.support import Worker, wait_until

LIMITS = CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 1 << 20)
ONE = CachePoolUsage(host_bytes=1)


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool.create(pool_name, LIMITS) as pool:
        yield pool


@pytest.fixture
def holder(pool: CacheResidencyPool) -> Iterator[Worker]:
    """A stopped process that holds the lock of `pool`."""
    with Worker("from tests.pool.raw import Lock") as worker:
        worker.call("lock = Lock(path)", path=str(segment_path(pool.name)))
        hold(worker)
        yield worker


def hold(holder: Worker) -> None:
    holder.call("lock.take()")
    holder.stop()


def let_go(holder: Worker) -> None:
    holder.begin("lock.give()")
    holder.cont()
    holder.finish()


def kill(holder: Worker) -> None:
    holder.kill()


def host_bytes(pool: CacheResidencyPool) -> int:
    return pool.report().current_host_bytes


@pytest.mark.parametrize("end", [let_go, kill])
def test_finalizers_do_not_wait_and_their_charges_go_later(
    pool: CacheResidencyPool, holder: Worker, end: Callable[[Worker], None]
) -> None:
    let_go(holder)
    tokens: list[object] = [pool.reserve(ONE) for _ in range(50)]
    members = [pool.register_manager(number) for number in range(10)]
    for member in members:
        pool.update_manager(member.manager, ONE)
    kept = pool.reserve(ONE)
    hold(holder)
    tokens.clear()
    cycle: list[object] = [*members]
    cycle.append(cycle)
    del members, member, cycle
    gc.collect()
    end(holder)  # only now: nothing above has waited for the lock
    assert host_bytes(pool) == 1
    assert pool.report().managers == 0
    assert pool.verify().ok
    kept.release()


def test_what_is_queued_goes_before_the_next_admission(
    pool: CacheResidencyPool, holder: Worker
) -> None:
    let_go(holder)
    whole = CachePoolUsage(host_bytes=1 << 20)
    token = pool.reserve(whole)
    hold(holder)
    del token
    let_go(holder)
    pool.reserve(whole).release()


def test_what_is_queued_goes_with_a_close(pool: CacheResidencyPool, holder: Worker) -> None:
    let_go(holder)
    other = CacheResidencyPool.attach(pool.name)
    token = other.reserve(ONE)
    hold(holder)
    del token
    let_go(holder)
    other.close()
    assert host_bytes(pool) == 0


def test_a_pool_dropped_meanwhile_is_swept(pool: CacheResidencyPool, holder: Worker) -> None:
    """Its last reference went when nobody could take the lock: its slot is left like a dead one."""
    let_go(holder)
    other = CacheResidencyPool.attach(pool.name)
    token = other.reserve(ONE)
    hold(holder)
    del other, token
    gc.collect()
    let_go(holder)
    assert host_bytes(pool) == 1
    assert [owner.pid for owner in pool.sweep()] == [os.getpid()]
    assert host_bytes(pool) == 0
    assert len(pool.owners()) == 1


def test_an_explicit_release_takes_effect_before_it_returns(
    pool: CacheResidencyPool, holder: Worker
) -> None:
    let_go(holder)
    token = pool.reserve(ONE)
    hold(holder)
    thread = threading.Thread(target=token.release)
    thread.start()
    wait_until(lambda: token.released, "the release begins")
    assert thread.is_alive()
    let_go(holder)
    thread.join()
    with CacheResidencyPool.observe(pool.name) as outsider:
        assert host_bytes(outsider) == 0


def test_a_call_ends_at_the_deadline_naming_the_holder(
    pool: CacheResidencyPool, holder: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "LOCK_DEADLINE_NS", 100_000_000)
    for call in (pool.report, lambda: pool.reserve(ONE), lambda: pool.register_manager(1)):
        with pytest.raises(SegmentError.LockHeld) as caught:
            call()
        assert caught.value.pid == holder.pid
        assert caught.value.state == "T"
        assert caught.value.waited_ns >= 100_000_000
    let_go(holder)
    report = pool.report()
    assert (report.current_host_bytes, report.managers) == (0, 0)


def test_a_release_that_meets_the_deadline_is_queued(
    pool: CacheResidencyPool, holder: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go(holder)
    token, member = pool.reserve(ONE), pool.register_manager(1)
    monkeypatch.setattr(_core, "LOCK_DEADLINE_NS", 100_000_000)
    hold(holder)
    token.release()
    with member:
        pass
    let_go(holder)
    report = pool.report()
    assert (report.current_host_bytes, report.managers) == (0, 0)


def test_a_killed_holder_is_no_holder(pool: CacheResidencyPool, holder: Worker) -> None:
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(host_bytes(pool)))
    thread.start()
    holder.kill()
    thread.join()
    assert answers == [0]
    assert pool.verify().ok


# ---- signals while waiting for the lock ----------------------------------------------------------


def wait_in_the_lock(pool: CacheResidencyPool) -> int:
    return host_bytes(pool)


class Interruption:
    """Signals the main thread until `enough`, once it is inside `wait_in_the_lock`."""

    def __init__(self, enough: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=self._run, args=(enough,))
        self._main = threading.main_thread().ident

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self, enough: Callable[[], object]) -> None:
        wait_until(self._is_waiting, "the main thread is inside the call")
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(enough, "the handler has run")

    def _is_waiting(self) -> bool:
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None and frame.f_code is not wait_in_the_lock.__code__:
            frame = frame.f_back
        return frame is not None


OnSignal = Callable[[Callable[[], object]], None]


@pytest.fixture
def on_signal() -> Iterator[OnSignal]:
    """Sets what SIGUSR1 does in this test."""

    def set_handler(run: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: run())

    before = signal.getsignal(signal.SIGUSR1)
    yield set_handler
    signal.signal(signal.SIGUSR1, before)


def test_a_token_dies_in_the_thread_that_waits_for_the_lock_p10(
    pool: CacheResidencyPool, holder: Worker, on_signal: OnSignal
) -> None:
    let_go(holder)
    tokens = [pool.reserve(ONE)]
    hold(holder)

    def drop_and_let_go() -> None:
        tokens.clear()
        let_go(holder)

    on_signal(drop_and_let_go)
    with Interruption(lambda: not tokens):
        wait_in_the_lock(pool)
    with CacheResidencyPool.observe(pool.name) as outsider:
        assert host_bytes(outsider) == 0, "the call that waited has drained at its end"


def test_a_handler_may_call_into_the_pool(
    pool: CacheResidencyPool, holder: Worker, on_signal: OnSignal
) -> None:
    seen: list[int] = []

    def handle() -> None:
        let_go(holder)
        token = pool.reserve(ONE)
        seen.append(host_bytes(pool))
        token.release()

    on_signal(handle)
    with Interruption(lambda: seen):
        assert wait_in_the_lock(pool) == 0
    assert seen == [1]


def test_a_handler_may_close_the_pool_that_waits_c41(
    pool: CacheResidencyPool, holder: Worker, on_signal: OnSignal
) -> None:
    """The usual SIGTERM handler of a worker: the interrupted call must not wait for itself."""

    def handle() -> None:
        let_go(holder)
        pool.close()

    on_signal(handle)
    with Interruption(lambda: pool.closed), pytest.raises(SegmentError.Closed):
        wait_in_the_lock(pool)


def test_a_handler_that_raises_ends_the_call(
    pool: CacheResidencyPool, holder: Worker, on_signal: OnSignal
) -> None:
    raised: list[str] = []

    def handle() -> None:
        raised.append("once")
        raise KeyboardInterrupt

    on_signal(handle)
    with Interruption(lambda: raised), pytest.raises(KeyboardInterrupt):
        wait_in_the_lock(pool)
    let_go(holder)
    assert host_bytes(pool) == 0


def test_time_that_a_waiter_did_not_wait_is_not_counted(
    pool: CacheResidencyPool,
    holder: Worker,
    on_signal: OnSignal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped for an hour inside a slice, it gave up and blamed whoever held the lock then."""
    now, leaps = time.monotonic_ns, itertools.count(1)
    monkeypatch.setattr(time, "monotonic_ns", lambda: now() + next(leaps) * 3600 * 10**9)
    done: list[bool] = []

    def handle() -> None:
        let_go(holder)
        done.append(True)

    on_signal(handle)
    with Interruption(lambda: done):
        assert wait_in_the_lock(pool) == 0


def test_a_release_that_is_interrupted_still_happens(
    pool: CacheResidencyPool, holder: Worker, on_signal: OnSignal
) -> None:
    let_go(holder)
    token = pool.reserve(ONE)
    hold(holder)
    raised: list[str] = []

    def handle() -> None:
        raised.append("once")
        raise KeyboardInterrupt

    on_signal(handle)

    class Releasing:
        """Has the name that `Interruption` looks for in its frame."""

        def report(self) -> object:
            token.release()
            raise AssertionError("the release was not interrupted")

    with Interruption(lambda: raised), pytest.raises(KeyboardInterrupt):
        wait_in_the_lock(Releasing())  # type: ignore[arg-type]
    let_go(holder)
    assert host_bytes(pool) == 0


def test_threads_that_waited_together_do_not_outgrow_the_queue(
    pool: CacheResidencyPool, holder: Worker
) -> None:
    """Room for every token in the finalizers' queue is kept, also when many are made at once."""
    let_go(holder)
    tokens: list[object] = [pool.reserve(ONE) for _ in range(15)]  # the queue's first room is 16
    hold(holder)
    threads = [threading.Thread(target=lambda: tokens.append(pool.reserve(ONE))) for _ in range(20)]
    for thread in threads:
        thread.start()
    let_go(holder)
    for thread in threads:
        thread.join()
    assert host_bytes(pool) == 35
    hold(holder)
    tokens.clear()
    let_go(holder)
    assert host_bytes(pool) == 0
