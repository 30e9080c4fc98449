"""Forks at bad moments, and by daemons: whatever is half done in the parent is its own.

Why: a fork copies locks that are taken, counts of calls in flight, queues of releases, numbers of
descriptors; each of them would be a lie in the child.
"""

import os
import signal
from pathlib import Path

import pytest

from shmcache import CachePoolUsage, CacheResidencyPool
from tests.process import kernel
from tests.process.probe import holding
from tests.process.scenes import slots, waiter_flags
from tests.support import Worker, wait_until

# ---- forking at a bad moment -------------------------------------------------------------------

ATTACH_AND_FORK = """
def attach_and_detach():
    while not stop:
        shmcache.CacheResidencyPool.attach(pool.name).close()
def one_child():
    signal.alarm(20)
    with shmcache.CacheResidencyPool.attach(pool.name) as mine, mine.reserve(U(1)):
        pass
def forks(count):
    'Exit statuses that are not 0.'
    bad = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                one_child()
                os._exit(0)
            finally:
                os._exit(1)
        bad += [status for status in [os.waitpid(pid, 0)[1]] if status]
    return bad
stop = False
thread = threading.Thread(target=attach_and_detach)
"""


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.ci)])
def test_c02_fork_while_another_thread_attaches(
    pool: CacheResidencyPool, parent: Worker, count: int
) -> None:
    """No lock that a fork can copy in its taken state is needed by the child."""
    parent.call(ATTACH_AND_FORK)
    assert parent.call("thread.start(); bad = forks(count); stop = True; bad", count=count) == []
    parent.call("thread.join()")
    pool.sweep()
    assert slots(pool) == {parent.pid}
    assert pool.report().current_device_bytes == 10
    assert pool.verify().ok


def test_fork_while_threads_use_the_same_handle(pool: CacheResidencyPool, parent: Worker) -> None:
    """Calls in flight in the parent are not in flight in the child, which can even close."""
    parent.call("""
stop = False
def hammer():
    while not stop:
        with pool.reserve(U(1)):
            pool.owners()
threads = [threading.Thread(target=hammer) for _ in range(2)]
def use():
    with pool.reserve(U(1)):
        device()
    pool.close()
    return "closed"
for thread in threads:
    thread.start()
""")
    assert parent.call("[child(use) for _ in range(15)]") == ["closed"] * 15
    parent.call("stop = True\nfor thread in threads:\n thread.join()")
    assert pool.report().current_device_bytes == 10
    assert slots(pool) == {parent.pid}
    assert pool.verify().ok


@pytest.mark.parametrize("use", ["None", "device()"], ids=["at once", "having used the pool"])
def test_fork_in_a_signal_handler_during_a_lock_wait(
    pool: CacheResidencyPool, parent: Worker, probe: Path, path: Path, use: str
) -> None:
    """Parent and child both return to the interrupted call, and both finish it."""
    parent.call(f"""
there, here = os.pipe()
def handler(*_):
    global kid
    kid = os.fork()
    tell("forked") if kid else ({use})
signal.signal(signal.SIGUSR1, handler)
def wait():
    value = device()
    if kid == 0:
        signal.alarm(30)
        with pool.reserve(U(1)):
            pool.close()
        os.write(here, str(value).encode())
        os._exit(0)
    return value, int(os.read(there, 100)), os.waitpid(kid, 0)[1]
""")
    with holding(probe, path) as holder:
        parent.begin("tell('starts'); wait()")
        parent.expect("starts")
        wait_until(lambda: kernel.waits_in_futex(parent.pid), "the parent waits for the lock")
        os.kill(parent.pid, signal.SIGUSR1)
        parent.expect("forked")
        assert holder.say("u") == "u OK"
    assert parent.finish() == [10, 10, 0]
    pool.sweep()
    assert slots(pool) == {parent.pid}
    assert pool.report().current_device_bytes == 10


def test_fork_with_postponed_releases(
    pool: CacheResidencyPool, parent: Worker, probe: Path, path: Path
) -> None:
    """What the parent still has to release is not released by the child, nor forgotten."""
    with holding(probe, path) as holder:
        parent.call("token = None")  # a finalizer that met a taken lock
        holder.send("u")
        assert holder.line() == "u OK"
    assert parent.call("child(device)") == 10
    assert pool.report().current_device_bytes == 10
    assert parent.call("device()") == 0
    assert pool.report().current_device_bytes == 0
    assert pool.verify().ok


def test_fork_while_a_thread_waits_for_capacity(
    pool: CacheResidencyPool, parent: Worker, path: Path
) -> None:
    """The child can wait and be woken by itself; the parent's thread gets its turn."""
    parent.call("""
got = []
def wait():
    got.append(pool.reserve(U(985), timeout=None))
thread = threading.Thread(target=wait)
""")
    with pool.reserve(CachePoolUsage(10)):
        parent.call("thread.start()")
        wait_until(lambda: waiter_flags(path), "the thread waits")
        said = parent.call("child(lambda: attempt(lambda: pool.reserve(U(985), timeout=0.05)))")
        assert said == "CachePoolError.BudgetExceeded"
    parent.call("thread.join()")
    assert parent.call("[t.usage.device_bytes for t in got]") == [985]
    assert pool.report().current_device_bytes == 995


# ---- daemons -----------------------------------------------------------------------------------


def test_a_daemon_finds_the_pool_by_name(pool: CacheResidencyPool, parent: Worker) -> None:
    """Its descriptors are gone and their numbers are other files, which stay open."""
    said, intact = parent.call(
        "daemon(lambda: (pool.reserve(U(1)).usage.device_bytes, len(pids()), pool.close()))"
    )
    assert said == [1, 3, None]
    assert intact
    assert slots(pool) == {parent.pid}


def test_a_daemon_that_only_ends_closes_nothing_of_others(
    pool: CacheResidencyPool, parent: Worker
) -> None:
    """Closing an inherited handle must not close what has its number by now."""
    said, intact = parent.call("daemon(lambda: (pool.close(), gc.collect(), 'closed')[2])")
    assert (said, intact) == ("closed", True)


def test_a_daemon_is_not_led_into_another_epoch(pool: CacheResidencyPool, parent: Worker) -> None:
    """What has the name by now is not what was inherited: said, not used."""
    before = pool.report()
    CacheResidencyPool.destroy(pool.name, force=True)
    with CacheResidencyPool.create(pool.name, pool.limits) as successor:
        said, intact = parent.call("daemon(lambda: attempt(device))")
        assert (said, intact) == ("SegmentError.Retired", True)
        assert len(successor.owners()) == 1
        assert successor.report().current_device_bytes == 0
    assert before.current_device_bytes == 10


def test_a_daemon_has_lost_an_anonymous_pool(parent: Worker) -> None:
    """Nothing leads back to it; the error says so, and nothing of others is touched."""
    said, intact = parent.call("""
pool = shmcache.CacheResidencyPool(pool.limits)
daemon(lambda: attempt(device))
""")
    assert (said, intact) == ("SegmentError.Closed", True)
