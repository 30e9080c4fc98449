"""Waiting for capacity: `reserve(usage, timeout=...)`, its waiters and what wakes them."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CachePoolMembership,
    CachePoolReservation,
    CachePoolResource,
    CachePoolUsage,
    CacheResidencyPool,
    SegmentError,
)
from shmcache.bounds import U64_MAX
from tests.pool import raw
from tests.support import Worker, WorkerError, wait_until

LIMITS = CachePoolLimits(10, 10, 10, 10)
WHOLE = CachePoolUsage(host_bytes=10)
ONE = CachePoolUsage(host_bytes=1)
Token = CachePoolReservation | CachePoolMembership
REFUSAL = CachePoolError.BudgetExceeded(CachePoolResource.HOST, 11, 10)

# A waiter that sleeps until it is woken: without a wake it would not look again within the test.
WAITER = """
from shmcache import CachePoolUsage, CacheResidencyPool, bounds
bounds.LOCK_SLICE_NS = 3600 * 10**9

def attach(name):
    global pool
    pool = CacheResidencyPool.attach(name)

def wait():
    global token
    token = pool.reserve(CachePoolUsage(host_bytes=1), timeout=3600)
"""


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool.create(pool_name, LIMITS, owners_max=200) as pool:
        yield pool


@pytest.fixture
def waiter(pool: CacheResidencyPool) -> Iterator[Worker]:
    with Worker(WAITER) as worker:
        worker.call("attach(name)", name=pool.name)
        yield worker


def wait_for_waiters(pool: CacheResidencyPool, count: int) -> None:
    with raw.Segment(pool.fileno()) as segment:
        wait_until(lambda: segment.waiters() == count, f"{count} owners wait for capacity")


def begin_waiting(pool: CacheResidencyPool, waiter: Worker) -> None:
    waiter.begin("wait()")
    wait_for_waiters(pool, 1)


def in_a_thread(run: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start it; what it gave, or raised, will be in the list."""
    results: list[Any] = []

    def collect() -> None:
        try:
            results.append(run())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    return thread, results


# ---- timeouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, 0.02])
def test_the_refusal_itself_is_raised_when_time_is_up(
    pool: CacheResidencyPool, timeout: float
) -> None:
    token = pool.reserve(WHOLE)
    for usage in (ONE, CachePoolUsage(disk_bytes=3, host_bytes=1)):
        with pytest.raises(CachePoolError.BudgetExceeded) as caught:
            pool.reserve(usage, timeout=timeout)
        assert caught.value == REFUSAL
    wait_for_waiters(pool, 0)
    token.release()
    pool.reserve(ONE, timeout=timeout).release()


@pytest.mark.parametrize("timeout", [None, 0, 0.5, 7, float("inf"), 10**400])
def test_room_needs_no_waiting(pool: CacheResidencyPool, timeout: float | None) -> None:
    pool.reserve(WHOLE, timeout=timeout).release()
    pool.reserve_transfer(10, timeout=timeout).release()


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (-1, ValueError),
        (-1e-9, ValueError),
        (float("-inf"), ValueError),
        (float("nan"), ValueError),
        (True, TypeError),
        (False, TypeError),
        ("1", TypeError),
    ],
)
def test_a_timeout_outside_its_domain_is_told_at_once(
    pool: CacheResidencyPool, timeout: Any, error: type[Exception]
) -> None:
    """Also when there is room: a mistake must not show only under load."""
    with pytest.raises(error, match="timeout"):
        pool.reserve(ONE, timeout=timeout)
    with pytest.raises(error, match="timeout"):
        pool.reserve_transfer(1, timeout=timeout)
    assert pool.report().current_host_bytes == 0


@pytest.mark.parametrize(
    ("usage", "error"),
    [
        (
            CachePoolUsage(host_bytes=11),
            CachePoolError.BudgetExceeded(CachePoolResource.HOST, 11, 10),
        ),
        (
            CachePoolUsage(disk_bytes=11),
            CachePoolError.BudgetExceeded(CachePoolResource.DISK, 11, 10),
        ),
        (
            CachePoolUsage(transfer_in_flight_bytes=U64_MAX, disk_bytes=11),
            CachePoolError.BudgetExceeded(CachePoolResource.TRANSFER_IN_FLIGHT, U64_MAX, 10),
        ),
        (
            CachePoolUsage(device_bytes=U64_MAX),
            CachePoolError.AccountingOverflow("admission_validation"),
        ),
    ],
)
def test_what_can_never_fit_is_refused_at_once(
    pool: CacheResidencyPool, usage: CachePoolUsage, error: CachePoolError
) -> None:
    """With no end to the waiting: the test would not end."""
    kept = pool.reserve(CachePoolUsage(device_bytes=1))
    with pytest.raises(CachePoolError) as caught:
        pool.reserve(usage, timeout=None)
    assert caught.value == error
    kept.release()


def test_a_full_table_is_waited_for(pool_name: str) -> None:
    with CacheResidencyPool.create(pool_name, LIMITS, reservations_max=1) as pool:
        token = pool.reserve(ONE)
        with pytest.raises(SegmentError.TableFull) as caught:
            pool.reserve(ONE, timeout=0.01)
        assert caught.value == SegmentError.TableFull("reservations", 1)
        thread, results = in_a_thread(lambda: pool.reserve(ONE, timeout=60))
        wait_for_waiters(pool, 1)
        token.release()
        thread.join()
        assert isinstance(results.pop(), CachePoolReservation)


# ---- waking --------------------------------------------------------------------------------------


def test_a_release_in_another_thread_ends_the_waiting(pool: CacheResidencyPool) -> None:
    token = pool.reserve(WHOLE)
    thread, results = in_a_thread(lambda: pool.reserve(ONE, timeout=None))
    wait_for_waiters(pool, 1)
    token.release()
    thread.join()
    assert isinstance(results[0], CachePoolReservation)
    assert pool.report().current_host_bytes == 1
    wait_for_waiters(pool, 0)


def by_release(pool: CacheResidencyPool, kept: list[Token]) -> Callable[[], object]:
    return pool.reserve(WHOLE).release


def by_dropping(pool: CacheResidencyPool, kept: list[Token]) -> Callable[[], object]:
    tokens = [pool.reserve(WHOLE)]
    return tokens.clear


def by_publishing_less(pool: CacheResidencyPool, kept: list[Token]) -> Callable[[], object]:
    kept.append(pool.register_manager(1))
    pool.update_manager(1, WHOLE)
    return lambda: pool.update_manager(1, ONE)


def by_publishing_and_releasing(
    pool: CacheResidencyPool, kept: list[Token]
) -> Callable[[], object]:
    kept.append(pool.register_manager(1))
    token = pool.reserve(WHOLE)
    return lambda: pool.publish_and_release(1, ONE, token)


def by_leaving_as_manager(pool: CacheResidencyPool, kept: list[Token]) -> Callable[[], object]:
    member = pool.register_manager(1)
    pool.update_manager(1, WHOLE)
    return member.release


def by_closing(pool: CacheResidencyPool, kept: list[Token]) -> Callable[[], object]:
    other = CacheResidencyPool.attach(pool.name)
    kept.append(other.reserve(WHOLE))
    return other.close


@pytest.mark.parametrize(
    "way",
    [
        by_release,
        by_dropping,
        by_publishing_less,
        by_publishing_and_releasing,
        by_leaving_as_manager,
        by_closing,
    ],
)
def test_whatever_gives_back_wakes_other_processes(
    pool: CacheResidencyPool,
    waiter: Worker,
    way: Callable[[CacheResidencyPool, list[Token]], Callable[[], object]],
) -> None:
    kept: list[Token] = []
    end = way(pool, kept)
    begin_waiting(pool, waiter)
    end()
    waiter.finish()
    wait_for_waiters(pool, 0)
    assert waiter.call("token.usage.host_bytes") == 1


def test_a_sweep_by_somebody_wakes_the_waiter(pool: CacheResidencyPool, waiter: Worker) -> None:
    with Worker("from shmcache import CachePoolUsage, CacheResidencyPool") as doomed:
        doomed.call("pool = CacheResidencyPool.attach(name)", name=pool.name)
        doomed.call("token = pool.reserve(CachePoolUsage(host_bytes=10))")
        begin_waiting(pool, waiter)
        doomed.kill()
    assert len(pool.sweep()) == 1
    waiter.finish()


def test_a_refusal_sweeps_before_it_is_told(pool: CacheResidencyPool) -> None:
    """A dead owner's charges are no reason to refuse, with or without a timeout."""
    with Worker("from shmcache import CachePoolUsage, CacheResidencyPool") as doomed:
        doomed.call("pool = CacheResidencyPool.attach(name)", name=pool.name)
        doomed.call("token = pool.reserve(CachePoolUsage(host_bytes=10))")
        with pytest.raises(CachePoolError.BudgetExceeded):
            pool.reserve(ONE)
        doomed.kill()
    pool.reserve(WHOLE).release()
    assert len(pool.owners()) == 1


def test_a_waiter_notices_a_death_by_itself(pool: CacheResidencyPool) -> None:
    """Nobody wakes it and nobody else sweeps."""
    with Worker("from shmcache import CachePoolUsage, CacheResidencyPool") as doomed:
        doomed.call("pool = CacheResidencyPool.attach(name)", name=pool.name)
        doomed.call("token = pool.reserve(CachePoolUsage(host_bytes=10))")
        thread, results = in_a_thread(lambda: pool.reserve(ONE, timeout=None))
        wait_for_waiters(pool, 1)
        doomed.kill()
        thread.join()
    assert isinstance(results[0], CachePoolReservation)


def test_many_waiters_share_what_comes_free(pool: CacheResidencyPool) -> None:
    """Twelve threads want 4 of 10 bytes: never more than two at once, and all in the end."""
    peak = pool.reserve(WHOLE)
    four = CachePoolUsage(host_bytes=4)
    levels: list[int] = []

    def work() -> None:
        with pool.reserve(four, timeout=None):
            levels.append(pool.report().current_host_bytes)

    started = [in_a_thread(work) for _ in range(12)]
    wait_for_waiters(pool, 1)
    peak.release()
    for thread, _ in started:
        thread.join()
    assert [results for _, results in started] == [[None]] * 12
    assert len(levels) == 12
    assert set(levels) <= {4, 8}
    wait_for_waiters(pool, 0)


def test_one_thread_that_stops_waiting_leaves_the_flag_of_the_others(
    pool: CacheResidencyPool,
) -> None:
    token = pool.reserve(WHOLE)
    first, _ = in_a_thread(lambda: pool.reserve(ONE, timeout=None))
    wait_for_waiters(pool, 1)
    with pytest.raises(CachePoolError.BudgetExceeded):
        pool.reserve(ONE, timeout=0.01)
    wait_for_waiters(pool, 1)
    token.release()
    first.join()
    wait_for_waiters(pool, 0)


# ---- waiters that end otherwise ------------------------------------------------------------------


def test_a_waiting_thread_sees_the_close(pool: CacheResidencyPool) -> None:
    token = pool.reserve(WHOLE)
    with CacheResidencyPool.attach(pool.name) as other:
        started = [in_a_thread(lambda: other.reserve(ONE, timeout=None)) for _ in range(3)]
        wait_for_waiters(pool, 1)
        other.close()
    for thread, results in started:
        thread.join()
        assert results == [SegmentError.Closed(pool.name)]
    wait_for_waiters(pool, 0)
    token.release()


def test_a_waiter_sees_that_the_pool_was_destroyed(
    pool: CacheResidencyPool, waiter: Worker
) -> None:
    """At once: it is woken, for its slice would last an hour."""
    token = pool.reserve(WHOLE)
    begin_waiting(pool, waiter)
    CacheResidencyPool.destroy(pool.name, force=True)
    with pytest.raises(WorkerError, match="Retired"):
        waiter.finish()
    token.release()


def test_a_waiter_sees_that_the_pool_was_poisoned(pool: CacheResidencyPool, waiter: Worker) -> None:
    token = pool.reserve(WHOLE)
    begin_waiting(pool, waiter)
    with raw.Segment(pool.fileno()) as segment:
        segment.damage_total()
    assert not pool.verify().ok
    with pytest.raises(WorkerError, match="Poisoned"):
        waiter.finish()
    token.release()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting(
    pool: CacheResidencyPool, waiter: Worker, number: signal.Signals
) -> None:
    token = pool.reserve(WHOLE)
    waiter.call("import signal, sys")
    # Whoever runs the tests in the background has SIGINT ignored, and that is inherited.
    waiter.call("signal.signal(signal.SIGINT, signal.default_int_handler)")
    waiter.call("signal.signal(signal.SIGTERM, lambda *_: (pool.close(), sys.exit(5)))")
    waiter.call("bounds.LOCK_SLICE_NS = 10**7")
    begin_waiting(pool, waiter)
    os.kill(waiter.pid, number)
    with pytest.raises(WorkerError) as caught:
        waiter.finish()
    expected = {signal.SIGINT: "KeyboardInterrupt", signal.SIGTERM: "SystemExit"}
    assert caught.value.kind == expected[number]
    wait_for_waiters(pool, 0)
    assert pool.report().current_host_bytes == 10
    token.release()


def test_a_stopped_waiter_costs_nothing(pool: CacheResidencyPool, waiter: Worker) -> None:
    token = pool.reserve(WHOLE)
    begin_waiting(pool, waiter)
    waiter.stop()
    token.release()
    pool.reserve(WHOLE).release()
    waiter.cont()
    waiter.finish()


def test_a_hundred_killed_waiters_cost_nothing_c51(
    pool: CacheResidencyPool, waiter: Worker
) -> None:
    def wait_in_children(count: int) -> list[int]:
        children = []
        for _ in range(count):
            child = os.fork()
            if child == 0:
                wait()  # type: ignore[name-defined]  # noqa: F821
                os._exit(0)
            children.append(child)
        return children

    def kill_all(children: list[int]) -> list[int]:
        for child in children:
            os.kill(child, signal.SIGKILL)
        return [os.waitpid(child, 0)[1] for child in children]

    with Worker(WAITER, "import os, signal", wait_in_children, kill_all) as nursery:
        nursery.call("attach(name)", name=pool.name)
        token = pool.reserve(WHOLE)
        children = nursery.call("wait_in_children(100)")
        wait_for_waiters(pool, 100)
        assert nursery.call("kill_all(children)", children=children) == [9] * 100
    begin_waiting_beside_the_dead(pool, waiter)
    token.release()
    waiter.finish()
    assert pool.report().current_host_bytes == 1
    pool.sweep()
    assert len(pool.owners()) == 2
    wait_for_waiters(pool, 0)
    assert pool.verify().ok


def begin_waiting_beside_the_dead(pool: CacheResidencyPool, waiter: Worker) -> None:
    """Dead waiters' flags stay until a sweep: the new one makes one more, or swept them all."""
    waiter.begin("wait()")
    with raw.Segment(pool.fileno()) as segment:
        wait_until(lambda: segment.waiters() in (1, 101), "the waiter waits")


def test_waiters_killed_one_by_one_never_block_the_releaser(pool: CacheResidencyPool) -> None:
    """Each dies at another moment of its waiting; every release still reaches the next one."""
    with Worker(WAITER) as nursery:
        nursery.call("import os\nattach(name)", name=pool.name)
        for _ in range(15):
            token = pool.reserve(WHOLE)
            child = nursery.call("child = os.fork()\nif child == 0:\n wait()\n os._exit(0)\nchild")
            with raw.Segment(pool.fileno()) as segment:
                wait_until(segment.waiters, "the child waits")
            os.kill(child, signal.SIGKILL)
            token.release()
            nursery.call("os.waitpid(child, 0) and None")
            pool.sweep()
    assert pool.report().current_host_bytes == 0
    assert pool.verify().ok
