"""Signals: a waiting call serves them, handlers may use the pool, and none of it leaves a trace.

Why: a worker that is deaf in C is killed by its arbiter, and a kill is what everything else here
must survive. A handler runs between slices of a wait, before the lock is held.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmcache
from shmcache import CacheResidencyPool, _core
from tests.process.kernel import waits_in_futex
from tests.process.probe import holding
from tests.process.scenes import slots, waiter_flags
from tests.support import Worker, WorkerDied, WorkerError, process_state, wait_until

PROMPT_S = 5.0  # far above the 50 ms of a slice, well below the 10 s after which a wait gives up
U = shmcache.CachePoolUsage

SETUP = """
import os, shmcache, signal, threading, traceback
from shmcache import CachePoolUsage as U
class Interrupted(Exception): pass
def attach(name):
    global pool, token, membership
    pool = shmcache.CacheResidencyPool.attach(name)
    token, membership = pool.reserve(U(10)), pool.register_manager(7)
def on(number, action):
    signal.signal(signal.Signals[number], action)
def interrupt(*_):
    tell("signal")
    raise Interrupted("by the handler")
def where(call):
    'Names of the functions that an Interrupted went through.'
    try:
        call()
    except Interrupted as error:
        frames = traceback.extract_tb(error.__traceback__)
        return [frame.name.rpartition(".")[2] for frame in frames]
"""

# Every call that takes the lock, and what else it needs.
ENTRIES = [
    "pool.report()",
    "pool.reserve(U(1))",
    "pool.reserve_transfer(1)",
    "pool.register_manager(None)",
    "pool.update_manager(7, U(3))",
    "pool.publish_and_release(7, U(3), token)",
    "token.release()",
    "membership.release()",
    "pool.owners()",
    "pool.verify()",
    "pool.close()",
]


@pytest.fixture
def worker(pool: CacheResidencyPool) -> Iterator[Worker]:
    """An attached worker that holds 10 device bytes and manager 7."""
    with Worker(SETUP) as worker:
        worker.call("attach(name)", name=pool.name)
        yield worker


def begin_waiting(worker: Worker, code: str) -> None:
    """Start `code` and return when it sleeps on the lock or for capacity."""
    worker.begin(f"tell('starts'); {code}")
    worker.expect("starts")
    wait_until(lambda: waits_in_futex(worker.pid), f"{code} waits")


# ---- while waiting for the lock ----------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
def test_c31_a_wait_for_a_stopped_holder_serves_sigterm(
    pool: CacheResidencyPool, path: Path, probe: Path, worker: Worker, entry: str
) -> None:
    """The handler's exception ends the call, from within the wait; afterwards all is as before."""
    before = pool.report()
    worker.call("on('SIGTERM', interrupt)")
    with holding(probe, path) as holder:
        holder.stop()
        begin_waiting(worker, f"where(lambda: {entry})")
        os.kill(worker.pid, signal.SIGTERM)
        worker.expect("signal", limit_s=PROMPT_S)
        passed = worker.finish(limit_s=PROMPT_S)
        assert {"_run_slowly", "_leave"} & set(passed), passed
        holder.cont()
        assert holder.say("u") == "u OK"
        gives_back = "release()" in entry and "publish" not in entry
        if entry == "pool.close()":
            assert worker.call("pool.closed")
            assert [owner.pid for owner in pool.sweep()] == [worker.pid]
        else:
            worker.call("pool.report()")  # what a release could not do is done by the next call
        after = pool.report()
        assert (before == after) is not (gives_back or entry == "pool.close()")
        assert pool.verify().ok


@pytest.mark.ci
def test_the_mutant_that_waits_plainly_is_deaf(
    pool: CacheResidencyPool, path: Path, probe: Path, plain_lock: Path
) -> None:
    """With one unbounded wait instead of slices the signal is not served until the lock is free."""
    with Worker(f"import sys; sys.path.insert(0, {str(plain_lock)!r})", SETUP) as worker:
        worker.call("attach(name); on('SIGTERM', interrupt)", name=pool.name)
        with holding(probe, path) as holder:
            holder.stop()
            begin_waiting(worker, "where(pool.report)")
            os.kill(worker.pid, signal.SIGTERM)
            with pytest.raises(AssertionError, match="gave no answer"):
                worker.expect("signal", limit_s=PROMPT_S / 5)


def test_c31_a_handler_may_close_the_pool_that_is_being_waited_for(
    pool: CacheResidencyPool, path: Path, probe: Path, worker: Worker
) -> None:
    """The close in the handler must not wait for the call that it interrupted."""
    worker.call("on('SIGTERM', lambda *_: (tell('in'), pool.close()))")
    with holding(probe, path) as holder:
        begin_waiting(worker, "pool.report()")
        os.kill(worker.pid, signal.SIGTERM)
        worker.expect("in", limit_s=PROMPT_S)
        assert holder.say("u") == "u OK"
    with pytest.raises(WorkerError, match=r"SegmentError\.Closed"):
        worker.finish(limit_s=PROMPT_S)
    assert slots(pool) == {holder.pid}


def test_a_release_interrupted_by_a_close_is_silent(
    pool: CacheResidencyPool, path: Path, probe: Path, worker: Worker
) -> None:
    """The token's charge went with the handle: nothing is left to complain about."""
    worker.call("on('SIGTERM', lambda *_: (tell('in'), pool.close()))")
    with holding(probe, path) as holder:
        begin_waiting(worker, "token.release()")
        os.kill(worker.pid, signal.SIGTERM)
        worker.expect("in", limit_s=PROMPT_S)
        assert holder.say("u") == "u OK"
    assert worker.finish(limit_s=PROMPT_S) is None
    assert pool.report().current_device_bytes == 0


def test_a_handler_may_release_while_the_interrupted_call_waits(
    pool: CacheResidencyPool, path: Path, probe: Path, worker: Worker
) -> None:
    """Two waits of one thread, one inside the other; both end when the holder goes on."""
    worker.call("on('SIGTERM', lambda *_: (tell('in'), token.release(), tell('out')))")
    with holding(probe, path) as holder:
        begin_waiting(worker, "pool.report().current_device_bytes")
        os.kill(worker.pid, signal.SIGTERM)
        worker.expect("in", limit_s=PROMPT_S)
        wait_until(lambda: waits_in_futex(worker.pid), "the handler waits")
        assert holder.say("u") == "u OK"
        worker.expect("out")
        assert worker.finish() == 0


def test_a_handler_may_close_what_another_thread_waits_in(
    pool: CacheResidencyPool, path: Path, probe: Path, worker: Worker
) -> None:
    """The thread gets a typed error at its next slice; the main thread is not held up."""
    worker.call("""
on('SIGTERM', lambda *_: (pool.close(), tell('closed')))
def wait():
    tell('starts')
    try:
        pool.reserve(U(1001 - 10), timeout=None)
    except shmcache.SegmentError.Closed:
        said.append('closed')
said = []
thread = threading.Thread(target=wait)
""")
    with pool.reserve(U(10)):
        worker.begin("thread.start(); thread.join(); said")
        worker.expect("starts")
        wait_until(lambda: waiter_flags(path), "the thread waits")
        os.kill(worker.pid, signal.SIGTERM)
        worker.expect("closed", limit_s=PROMPT_S)
        assert worker.finish(limit_s=PROMPT_S) == ["closed"]
    assert waiter_flags(path) == 0


# ---- the deadline ------------------------------------------------------------------------------


def expect_lock_held(pool: CacheResidencyPool, pid: int, state: str, least_ns: int) -> None:
    with pytest.raises(shmcache.SegmentError.LockHeld) as caught:
        pool.reserve(U(1))
    assert (caught.value.pid, caught.value.state) == (pid, state)
    assert caught.value.waited_ns >= least_ns


def test_c56_a_live_holder_is_never_robbed(
    pool: CacheResidencyPool, path: Path, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others get the bounded error with the holder's pid and state; the holder's change stands."""
    monkeypatch.setattr(_core, "LOCK_DEADLINE_NS", 120_000_000)
    with holding(probe, path) as holder:
        expect_lock_held(pool, holder.pid, "S", 120_000_000)
        holder.stop()
        expect_lock_held(pool, holder.pid, "T", 120_000_000)
        assert pool.sweep() == ()
        assert pool.state == "active"
        holder.cont()
        assert holder.say("r") == "r OK"
        expect_lock_held(pool, holder.pid, "S", 120_000_000)
        assert holder.say("u") == "u OK"
        assert pool.report().current_device_bytes == 1
        assert pool.verify().ok


@pytest.mark.ci
def test_c56_the_real_deadline(pool: CacheResidencyPool, path: Path, probe: Path) -> None:
    """Ten seconds, and then every other process still gets in once the holder is gone."""
    with holding(probe, path) as holder:
        holder.stop()
        expect_lock_held(pool, holder.pid, "T", 10_000_000_000)
    assert pool.report().current_device_bytes == 0


def test_a_release_that_found_a_stopped_holder_is_made_up_for(
    pool: CacheResidencyPool, path: Path, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`release` raises nothing; its charge goes with the next call that gets the lock."""
    monkeypatch.setattr(_core, "LOCK_DEADLINE_NS", 60_000_000)
    kept, dropped = pool.reserve(U(1)), pool.reserve(U(2))
    with holding(probe, path) as holder:
        holder.stop()
        kept.release()
        del dropped  # from a finalizer: without any wait
        holder.cont()
        assert holder.say("u") == "u OK"
    assert pool.report().current_device_bytes == 0


# ---- while waiting for capacity ----------------------------------------------------------------


def test_keyboard_interrupt_ends_a_wait_for_capacity(
    pool: CacheResidencyPool, path: Path, worker: Worker
) -> None:
    """And the flag that asks others for wake-ups is gone with it."""
    worker.call("on('SIGINT', signal.default_int_handler)")  # shells ignore it in the background
    with pool.reserve(U(990)):
        before = pool.report()
        begin_waiting(worker, "pool.reserve(U(1), timeout=None)")
        wait_until(lambda: waiter_flags(path) == 1 << 1, "the flag of slot 1 is set")
        os.kill(worker.pid, signal.SIGINT)
        with pytest.raises(WorkerError, match="KeyboardInterrupt"):
            worker.finish(limit_s=PROMPT_S)
        assert waiter_flags(path) == 0
        assert pool.report() == before
    assert worker.call("pool.reserve(U(990)).usage.device_bytes") == 990


def test_a_handler_may_release_what_is_waited_for(
    pool: CacheResidencyPool, path: Path, worker: Worker
) -> None:
    """The only holder of the bytes is the waiting thread itself, in its handler."""
    worker.call("on('SIGTERM', lambda *_: token.release())")
    with pool.reserve(U(990)):
        begin_waiting(worker, "pool.reserve(U(10), timeout=None).usage.device_bytes")
        wait_until(lambda: waiter_flags(path), "it waits")
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.finish(limit_s=PROMPT_S) == 10
    assert waiter_flags(path) == 0


def test_a_handler_may_close_the_pool_whose_capacity_is_waited_for(
    pool: CacheResidencyPool, path: Path, worker: Worker
) -> None:
    """The wait ends typed, and slot and flag are gone."""
    worker.call("on('SIGTERM', lambda *_: pool.close())")
    with pool.reserve(U(990)):
        begin_waiting(worker, "pool.reserve(U(1), timeout=None)")
        wait_until(lambda: waiter_flags(path), "it waits")
        os.kill(worker.pid, signal.SIGTERM)
        with pytest.raises(WorkerError, match=r"SegmentError\.Closed"):
            worker.finish(limit_s=PROMPT_S)
    assert waiter_flags(path) == 0
    assert slots(pool) == set()


def test_a_killed_waiter_is_forgotten(pool: CacheResidencyPool, path: Path, worker: Worker) -> None:
    """Its flag costs wake-ups only until the sweep."""
    with pool.reserve(U(990)):
        begin_waiting(worker, "pool.reserve(U(1), timeout=None)")
        wait_until(lambda: waiter_flags(path), "it waits")
        worker.kill()
        assert [owner.pid for owner in pool.sweep()] == [worker.pid]
        assert waiter_flags(path) == 0


# ---- without waiting ---------------------------------------------------------------------------


def test_handlers_may_use_the_pool_at_any_point(worker: Worker, pool: CacheResidencyPool) -> None:
    """A timer interrupts a busy loop wherever it is; the handler does what the loop does."""
    rounds = worker.call("""
served = 0
def handler(*_):
    global served
    with pool.reserve(U(1)):
        pool.update_manager(7, U(served % 5))
    served += 1
on('SIGALRM', handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
rounds = 0
while served < 300:
    with pool.reserve(U(2)):
        pool.report()
    rounds += 1
signal.setitimer(signal.ITIMER_REAL, 0)
pool.update_manager(7, U(0))
rounds
""")
    assert rounds > 0
    assert pool.report().current_device_bytes == 10
    assert pool.verify().ok


def test_c33_a_handler_that_exits_leaves_no_slot(worker: Worker, pool: CacheResidencyPool) -> None:
    """A SIGTERM handler that closes and exits in the middle of a wait: the slot is free at once."""
    worker.call("on('SIGTERM', lambda *_: (pool.close(), os._exit(5)))")
    with pool.reserve(U(990)):
        begin_waiting(worker, "pool.reserve(U(1), timeout=None)")
        os.kill(worker.pid, signal.SIGTERM)
        with pytest.raises(WorkerDied) as caught:
            worker.finish(limit_s=PROMPT_S)
    assert caught.value.code == 5
    assert slots(pool) == set()


# ---- a holder that dies ------------------------------------------------------------------------


def test_c44_a_holder_killed_before_its_first_write(
    pool: CacheResidencyPool, path: Path, probe: Path, worker: Worker
) -> None:
    """Waiters go on at once; the next one to lock may be a supervisor; nothing is poisoned."""
    with holding(probe, path) as holder:
        begin_waiting(worker, "pool.report().current_device_bytes")
        holder.kill()
        assert worker.finish(limit_s=PROMPT_S) == 10
    with shmcache.Supervisor(pool):
        wait_until(lambda: holder.pid not in slots(pool), "the supervisor reclaims")
    assert process_state(holder.pid) == ""
    assert pool.state == "active"
    assert pool.verify().ok
