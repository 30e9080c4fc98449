"""Failures that others reported of their shared memory, replayed on ours; each by its number.

Not here: what belongs to forks, signals, containers, sweeps and hosts is in the file of that name;
cases without a test are listed in docs/caveats.md.
"""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import shmcache
from shmcache import (
    CachePoolError,
    CachePoolReservation,
    CachePoolUsage,
    CacheResidencyPool,
    SegmentError,
)
from tests.pool.raw import Segment
from tests.process.probe import holding
from tests.process.scenes import LIMITS, OWNER
from tests.support import Worker, wait_until

# ---- C23: a report is of one instant -----------------------------------------------------------


@pytest.mark.parametrize("rounds", [20_000, pytest.param(1_000_000, marks=pytest.mark.ci)])
def test_c23_no_report_mixes_two_publications(pool: CacheResidencyPool, rounds: int) -> None:
    """A writer alternates two usages whose axes belong together; readers see one or the other."""
    with Worker(OWNER) as writer:
        writer.call("attach(name); membership.release(); token.release()", name=pool.name)
        writer.call("""
keep = pool.register_manager(5)
stop = False
def write():
    states = [U(100, transfer_in_flight_bytes=200, disk_bytes=300),
              U(101, transfer_in_flight_bytes=202, disk_bytes=303)]
    while not stop:
        for state in states:
            pool.update_manager(5, state)
thread = threading.Thread(target=write)
thread.start()
""")
        wait_until(lambda: pool.report().current_device_bytes, "the writer begins")
        seen: set[tuple[int, int, int]] = set()
        reports = 0
        while reports < rounds or len(seen) < 2:  # a busy machine may not let the writer move
            reports += 1
            report = pool.report()
            seen.add(
                (
                    report.current_device_bytes,
                    report.current_transfer_in_flight_bytes,
                    report.current_disk_bytes,
                )
            )
        writer.call("stop = True; thread.join()")
        assert seen == {(100, 200, 300), (101, 202, 303)}


# ---- C34, C35: starting ------------------------------------------------------------------------

STARTERS = (
    OWNER
    + """
import time
def start_and_die(name, seconds):
    'A worker that attaches, registers and works, killed so long after its start.'
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        while True:
            attach(name)
            pool.close()
    time.sleep(seconds)
    os.kill(pid, 9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
)


@pytest.mark.parametrize("starts", [60, pytest.param(500, marks=pytest.mark.ci)])
def test_c34_workers_killed_while_they_start(
    pool: CacheResidencyPool, rng: random.Random, starts: int
) -> None:
    """Forked starters, so that the time is spent in attach and register, not in imports. The table
    never fills, no slot is stuck, and the next one attaches as the first one did."""
    with Worker(STARTERS) as nursery:
        for _ in range(starts):
            code = nursery.call("start_and_die(name, s)", name=pool.name, s=rng.uniform(0, 0.02))
            assert code == -9
            assert len(pool.owners()) <= 1 + 2  # every attach collects those before it
        with CacheResidencyPool.attach(pool.name):
            assert len(pool.owners()) == 2
    report = pool.report()
    assert (report.managers, report.current_device_bytes, report.current_disk_bytes) == (0, 0, 0)
    assert pool.verify().ok


def test_c35_a_reload_runs_twice_the_workers_for_a_while(pool_name: str) -> None:
    """Newcomers are refused with true numbers while the old ones hold the budget; no table is full,
    and the newcomers succeed once the old ones are gone."""
    with (
        CacheResidencyPool.create(pool_name, LIMITS, owners_max=9) as pool,
        Worker(OWNER) as master,
    ):
        master.call("""
def worker(name, timeout):
    'Forked; [pid, pipe]: tells "admitted" or the refusal, and serves until told to end.'
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        signal.signal(signal.SIGTERM, lambda *_: (mine.close(), os._exit(0)))
        mine = shmcache.CacheResidencyPool.attach(name)
        member = mine.register_manager(None)
        try:
            kept = mine.reserve(U(250), timeout=timeout)
            os.write(here, b"admitted\\n")
        except shmcache.CachePoolError.BudgetExceeded as refusal:
            os.write(here, f"{refusal.required} of {refusal.budget}\\n".encode())
        while True:
            signal.pause()
    os.close(here)
    return pid, os.fdopen(there)
def start(count, timeout):
    return [worker(name, timeout) for _ in range(count)]
def said(workers):
    return [pipe.readline().strip() for _, pipe in workers]
""")
        master.call("old = start(4, 0)", name=pool_name)
        assert master.call("said(old)") == ["admitted"] * 4
        master.call("refused = start(1, 0)")
        assert master.call("said(refused)") == ["1250 of 1000"]
        master.call("os.kill(refused[0][0], 15); None")
        wait_until(lambda: len(pool.owners()) == 5, "the refused one leaves")
        master.call("new = start(4, 30)")  # a reload: they wait for their predecessors' budget
        wait_until(lambda: len(pool.owners()) == 9, "all are attached")
        assert master.call("[os.kill(pid, 15) for pid, _ in old[:2]]") == [None, None]
        master.call("[os.kill(pid, 9) for pid, _ in old[2:]]")
        assert master.call("said(new)") == ["admitted"] * 4
        assert pool.report().current_device_bytes == 1000
        assert pool.report().managers == 4


# ---- C43: damage -------------------------------------------------------------------------------

Action = Callable[[CacheResidencyPool, CachePoolReservation], object]

METHODS: dict[str, Action] = {
    "report": lambda pool, token: pool.report(),
    "reserve": lambda pool, token: pool.reserve(CachePoolUsage(1)),
    "reserve_transfer": lambda pool, token: pool.reserve_transfer(1),
    "reserve, waiting": lambda pool, token: pool.reserve(CachePoolUsage(1), timeout=30),
    "register": lambda pool, token: pool.register_manager(None),
    "update": lambda pool, token: pool.update_manager(1, CachePoolUsage(1)),
    "publish and release": lambda pool, token: pool.publish_and_release(
        1, CachePoolUsage(1), token
    ),
    "owners": lambda pool, token: pool.owners(),
}


def test_c43_damage_is_told_to_everybody(pool: CacheResidencyPool, path: Path) -> None:
    """One process finds it; from then on each call of each process says Poisoned, releases are
    silent, and nobody hangs or dies."""
    token, membership = pool.reserve(CachePoolUsage(1)), pool.register_manager(1)
    with Worker(OWNER) as other, Segment(path) as segment:
        other.call("attach(name)", name=pool.name)
        segment.damage_total()
        assert other.call("pool.report().current_host_bytes") == 1  # nobody has looked yet
        report = pool.verify()
        assert (report.ok, report.state) == (False, "poisoned")
        for name, method in METHODS.items():
            with pytest.raises(CachePoolError.Poisoned):
                method(pool, token)
            assert pool.state == "poisoned", name
        for code in ("pool.report()", "pool.reserve(U(1))", "pool.register_manager(None)"):
            with pytest.raises(Exception, match=r"CachePoolError\.Poisoned"):
                other.call(code)
        with pytest.raises(CachePoolError.Poisoned):
            CacheResidencyPool.attach(pool.name)
        token.release()
        membership.release()
        other.call("token.release(); membership.release(); pool.close()")
        pool.close()


# ---- C44, C46: a holder was killed -------------------------------------------------------------

# The first call after it, whatever it is. Each gets the pool, or makes one of its own.
FIRST_CALLS: dict[str, Action] = METHODS | {
    "release": lambda pool, token: token.release(),
    "sweep": lambda pool, token: pool.sweep(),
    "verify": lambda pool, token: pool.verify(),
    "state": lambda pool, token: pool.state,
    "repr": lambda pool, token: repr((pool, token)),
    "geometry": lambda pool, token: pool.geometry(),
    "close": lambda pool, token: pool.close(),
    "attach": lambda pool, token: CacheResidencyPool.attach(pool.name).close(),
    "observe": lambda pool, token: CacheResidencyPool.observe(pool.name).close(),
    "open_or_create": lambda pool, token: CacheResidencyPool.open_or_create(
        pool.name, LIMITS
    ).close(),
    "create": lambda pool, token: refused(
        SegmentError.Exists, CacheResidencyPool.create, pool.name, LIMITS
    ),
    "destroy": lambda pool, token: refused(
        SegmentError.InUse, CacheResidencyPool.destroy, pool.name
    ),
    "a finalizer": lambda pool, token: CacheResidencyPool.attach(pool.name) and None,
}


def refused(error: type[SegmentError], call: Callable[..., object], *arguments: object) -> None:
    """The call is refused in this way."""
    with pytest.raises(error):
        call(*arguments)


@pytest.mark.parametrize("first", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_c44_c46_the_first_call_after_a_holder_was_killed(
    pool: CacheResidencyPool, path: Path, probe: Path, first: Action
) -> None:
    """It recovers the lock or leaves it alone; it never keeps what the kernel says only once."""
    token, membership = pool.reserve(CachePoolUsage(1)), pool.register_manager(1)
    with Worker(OWNER) as other:
        other.call("attach(name)", name=pool.name)
        with holding(probe, path) as holder:
            holder.kill()
        made = first(pool, token)
        other.call("pool.report()", limit_s=9)  # below the deadline of a lock that stays taken
        assert other.call("pool.state") == "active"
        other.call("pool.sweep()")
        assert holder.pid not in other.call("[owner.pid for owner in pool.owners()]")
        assert other.call("pool.verify().ok")
    del made
    token.release()
    membership.release()


def test_c44_a_supervisor_is_next_to_lock(
    pool: CacheResidencyPool, path: Path, probe: Path
) -> None:
    """A killed holder is no event for it but a death like any other; and the next, and the next."""
    told: list[shmcache.SupervisorEventKind] = []
    with shmcache.Supervisor(pool, on_event=lambda event: told.append(event.kind)):
        for _ in range(3):
            with holding(probe, path) as holder:
                holder.kill()
            wait_until(lambda: len(pool.owners()) == 1, "the supervisor reclaims the holder")
    assert set(told) == {shmcache.SupervisorEventKind.RECLAIMED}
    assert pool.state == "active"
    assert pool.verify().ok


def test_c44_waiters_go_on_when_the_holder_dies(
    pool: CacheResidencyPool, path: Path, probe: Path
) -> None:
    """Four threads and another process wait at once; each is answered by one kill."""
    answers: list[int] = []

    def wait() -> None:
        answers.append(pool.report().current_device_bytes)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    with Worker(OWNER) as other:
        other.call("attach(name)", name=pool.name)
        with holding(probe, path) as holder:
            for thread in threads:
                thread.start()
            other.begin("pool.report().current_device_bytes")
            holder.kill()
            assert other.finish(limit_s=9) == 10
            for thread in threads:
                thread.join()
    assert answers == [10] * 4
    assert os.getpid() in [owner.pid for owner in pool.owners()]
