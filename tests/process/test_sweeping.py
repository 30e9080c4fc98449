"""Sweeps: what is proved dead comes back whole and at once, the living notice nothing of it.

Why: anybody may sweep at any moment, be stopped in the middle for an hour, and go on.
"""

import os
import random
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmcache
from shmcache import CachePoolUsage, CacheResidencyPool
from tests.process.probe import ENGINE, Probe, compile_probe, holding
from tests.process.scenes import LIMITS, OWNER, probe_verdict
from tests.support import Worker

MANY = 300  # reservations: more than the 128 that one chunk of a cleaning gives back


def attached(name: str) -> Worker:
    """An owner that holds 10 device bytes and a manager."""
    owner = Worker(OWNER)
    owner.call("attach(name)", name=name)
    return owner


# ---- G6 ----------------------------------------------------------------------------------------


def test_a_stopped_owner_loses_nothing_to_three_sweepers(pool: CacheResidencyPool) -> None:
    """Three processes sweep without pause for as long as it is stopped, and longer."""
    with attached(pool.name) as owner, attached(pool.name) as one, attached(pool.name) as two:
        sweepers = (one, two)
        held = pool.report()
        for sweeper in sweepers:
            sweeper.call("""
stop = False
def sweep():
    global swept
    swept = rounds = 0
    while not stop:
        swept += len(pool.sweep())
        rounds += 1
    return rounds
thread = threading.Thread(target=sweep)
thread.start()
""")
        owner.stop()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            assert pool.sweep() == ()
        assert pool.report() == held
        owner.cont()
        assert owner.call("pool.report().current_device_bytes") == 30
        owner.call("token.release(); membership.release()")
        for sweeper in sweepers:
            sweeper.call("stop = True; thread.join()")
            assert sweeper.call("swept") == 0
        assert pool.report().current_device_bytes == 20
        assert pool.report().current_disk_bytes == 14


# ---- a cleaner that is stopped half-way --------------------------------------------------------


def dead_owner(name: str, path: Path, probe: Path, reservations: int) -> tuple[int, int, int]:
    """(pid, slot, nonce) of a killed owner with so many reservations of one byte."""
    with Probe(probe, "hold", path) as owner:
        assert owner.line() == "held"
        for _ in range(reservations):
            assert owner.say("r") == "r OK"
        owner.kill()
    with CacheResidencyPool.observe(name) as observer:
        (record,) = [record for record in observer.owners() if record.pid == owner.pid]
    return record.pid, record.slot, record.nonce


@pytest.fixture
def roomy(pool_name: str) -> Iterator[CacheResidencyPool]:
    """A pool with room for thousands of small reservations."""
    limits = shmcache.CachePoolLimits(100_000, 0, 1000, 1000)
    with CacheResidencyPool.create(pool_name, limits) as pool:
        yield pool


def stop_half_way(cleaner: Probe) -> None:
    assert cleaner.line() == "half MORE 128"
    cleaner.stop()


def test_c14_a_cleaning_lets_others_in_between_its_chunks(
    roomy: CacheResidencyPool, probe: Path
) -> None:
    """The cleaner of a thousand tokens is stopped after its first chunk: nobody waits for it, and
    the next one finishes its work."""
    path = Path(f"/dev/shm/shmcache.{roomy.name}")
    pid, slot, nonce = dead_owner(roomy.name, path, probe, 1000)
    with Probe(probe, "clean", path, slot, nonce) as cleaner:
        stop_half_way(cleaner)
        assert roomy.report().current_device_bytes == 1000 - 128
        with roomy.reserve(CachePoolUsage(5)), attached(roomy.name):  # attaching sweeps
            assert roomy.report().current_device_bytes == 5 + 10
        assert pid not in [record.pid for record in roomy.owners()]
        cleaner.cont()
        cleaner.send("x")
        assert cleaner.line() == "done STALE 0"
    assert roomy.verify().ok


def late_cleaner(roomy: CacheResidencyPool, probe: Path, cleaner_program: Path) -> str:
    """What a cleaner says that slept while its slot found a new owner, who holds 7 bytes."""
    path = Path(f"/dev/shm/shmcache.{roomy.name}")
    _, slot, nonce = dead_owner(roomy.name, path, probe, MANY)
    with Probe(cleaner_program, "clean", path, slot, nonce) as cleaner:
        stop_half_way(cleaner)
        assert [dead.entries for dead in roomy.sweep()] == [MANY - 128]
        with holding(probe, path) as heir:
            for _ in range(7):
                assert heir.say("r") == "r OK"
            assert heir.say("u") == "u OK"
            assert slot in [owner.slot for owner in roomy.owners() if owner.pid == heir.pid]
            cleaner.cont()
            cleaner.send("x")
            said = cleaner.line()
            return f"{said}, {roomy.report().current_device_bytes} left"


def test_a_late_cleaner_clears_nothing(roomy: CacheResidencyPool, probe: Path) -> None:
    """The slot has another nonce by then."""
    assert late_cleaner(roomy, probe, probe) == "done STALE 0, 7 left"
    roomy.sweep()
    assert roomy.verify().ok


@pytest.mark.ci
def test_the_mutant_without_a_fence_robs_the_heir(
    roomy: CacheResidencyPool, probe: Path, tmp_path: Path
) -> None:
    """What the test above is for."""
    mutant = compile_probe(tmp_path / "mutant", "-DSHMC_MUTANT_UNFENCED_CLEANING")
    assert late_cleaner(roomy, probe, mutant) == "done OK 7, 0 left"


def test_killed_cleaners_leave_shorter_lists(
    roomy: CacheResidencyPool, probe: Path, rng: random.Random
) -> None:
    """Cleaner after cleaner is killed on the way; what they gave back stays given back."""
    path = Path(f"/dev/shm/shmcache.{roomy.name}")
    pid, slot, nonce = dead_owner(roomy.name, path, probe, 1000)
    left = 1000
    for _ in range(5):
        with Probe(probe, "clean", path, slot, nonce) as cleaner:
            assert cleaner.line() == "half MORE 128"
            cleaner.send("x")
            threading.Event().wait(rng.uniform(0, 0.0005))
        now = roomy.report().current_device_bytes
        assert now <= left
        left = now
        if not left:
            break
        assert roomy.verify().ok
    roomy.sweep()
    assert roomy.report().current_device_bytes == 0
    assert pid not in [record.pid for record in roomy.owners()]


# ---- what comes back, and when -----------------------------------------------------------------


def test_c12_nobody_waits_for_a_dead_holder(pool: CacheResidencyPool) -> None:
    """Everything is held by a killed worker: the next request is admitted, for a refusal sweeps."""
    with attached(pool.name) as holder:
        holder.call("rest = pool.reserve(U(990))")
        with pytest.raises(shmcache.CachePoolError.BudgetExceeded) as caught:
            pool.reserve(CachePoolUsage(1))  # it lives: answered at once
        assert (caught.value.required, caught.value.budget) == (1001, 1000)
        holder.kill()
        with pool.reserve(CachePoolUsage(1000)):
            assert pool.report().current_device_bytes == 1000


def test_c20_one_death_is_one_death(pool: CacheResidencyPool) -> None:
    """Of three workers one is killed; the report is the sum of the other two, who go on."""
    with attached(pool.name) as one, attached(pool.name) as two, attached(pool.name) as three:
        assert pool.report().current_device_bytes == 30
        one.kill()
        assert [owner.pid for owner in pool.sweep()] == [one.pid]
        report = pool.report()
        assert (report.current_device_bytes, report.current_disk_bytes) == (20, 14)
        for worker in (two, three):
            assert worker.call("token.released, membership.released") == [False, False]
            worker.call("pool.update_manager(membership.manager, U(1)); token.release()")
        assert pool.report().current_device_bytes == 2
        assert pool.verify().ok


@pytest.mark.parametrize("resident_mib", [64, pytest.param(512, marks=pytest.mark.ci)])
def test_c18_a_transfer_is_charged_until_its_process_is_gone(
    pool: CacheResidencyPool, path: Path, probe: Path, resident_mib: int
) -> None:
    """The lock of a dying process is free long before its memory is; only the pidfd counts."""
    with attached(pool.name) as owner:
        owner.call("memory = bytearray(size)", size=resident_mib << 20)
        owner.call("transfer = pool.reserve_transfer(900)")
        with holding(probe, path):
            pass  # killed inside the lock, which has to be recovered meanwhile
        death = os.pidfd_open(owner.pid)
        try:
            os.kill(owner.pid, 9)
            while True:
                pool.sweep()
                charged = pool.report().current_transfer_in_flight_bytes
                gone = bool(select.select([death], [], [], 0)[0])
                assert charged == 900 or gone, "given back before the process was gone"
                if gone:
                    break
            pool.sweep()
            assert pool.report().current_transfer_in_flight_bytes == 0
        finally:
            os.close(death)


def test_c36_a_table_full_of_the_dead(pool_name: str) -> None:
    """Attaching collects them, with nobody else there to do it: at once, and one after another."""
    with CacheResidencyPool.create(pool_name, LIMITS, owners_max=64) as pool, Worker(OWNER) as herd:
        herd.call("""
def attach_and_be_killed(name):
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        attach(name)
        os.write(here, b".")
        signal.pause()
    os.read(there, 1)
    os.close(there)
    os.close(here)
    return pid
def kill(pids):
    for pid in pids:
        os.kill(pid, 9)
    for pid in pids:
        os.waitpid(pid, 0)
""")
        herd.call("living = [attach_and_be_killed(name) for _ in range(63)]", name=pool_name)
        assert len(pool.owners()) == 64
        with pytest.raises(shmcache.SegmentError.OwnersFull) as caught:
            CacheResidencyPool.attach(pool_name)
        assert caught.value.owners_max == 64
        herd.call("kill(living)")
        assert len(pool.owners()) == 64
        herd.call("for _ in range(17): kill([attach_and_be_killed(name)])")
        with attached(pool_name):
            assert pool.report().current_device_bytes == 10
        pool.sweep()
        assert pool.report().current_device_bytes == 0
        assert pool.verify().ok


# ---- clocks ------------------------------------------------------------------------------------


def test_c52_a_verdict_knows_no_wall_clock(path: Path, probe: Path, tmp_path: Path) -> None:
    """Owner and judge whose wall clock jumps by two hours at every look agree with each other and
    with those whose clock stands; the sources that decide do not name it."""
    names = ("clock_gettime", "time", "gettimeofday")
    wraps = [f"-Wl,--wrap={name}" for name in names]
    jumper = compile_probe(tmp_path / "jumper", "-DPROBE_CLOCK_JUMPS", *wraps)
    with Probe(jumper, "clock") as clock:
        assert int(clock.line()) > 7_000_000_000_000
    with holding(jumper, path) as owner:
        assert owner.say("u") == "u OK"
        for judge in (jumper, probe):
            assert probe_verdict(str(judge), path, owner.pid) == "alive"
        owner.stop()
        assert probe_verdict(str(jumper), path, owner.pid) == "alive"
        owner.kill()
        assert probe_verdict(str(jumper), path, owner.pid) == "dead"
    for source in ("owners.c", "process.c", "lock.c", "operations.c", "redo.c", "accounts.c"):
        assert "realtime" not in (ENGINE / source).read_text(), source


@pytest.mark.ci
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.environ.get("SHMCACHE_TEST_STEP_CLOCK"),
    reason="steps the clock of the whole machine: set SHMCACHE_TEST_STEP_CLOCK=1 as root",
)
def test_c52_the_clock_is_stepped(pool: CacheResidencyPool) -> None:
    """The real thing, an hour ahead and an hour back; the clock is right again afterwards."""
    with attached(pool.name) as owner:
        held = pool.report()
        for step_s in (3600, -3600):
            started, wall = time.monotonic(), time.clock_gettime(time.CLOCK_REALTIME)
            time.clock_settime(time.CLOCK_REALTIME, wall + step_s)
            try:
                swept = pool.sweep()
            finally:
                time.clock_settime(time.CLOCK_REALTIME, wall + time.monotonic() - started)
            assert swept == ()
        assert pool.report() == held
        assert owner.call("pool.report().current_device_bytes") == 10
