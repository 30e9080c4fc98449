"""Whole programs as people write them: servers that preload, multiprocessing, every kind of end.

Why: none of them knows that a pool wants to be told about forks and exits. It does not.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shmcache import CachePoolUsage, CacheResidencyPool
from tests.process.scenes import FORKS, slots
from tests.support import ROOT, SHM, Worker, process_state, wait_until


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end, with both outputs."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


# ---- programs that only attach -----------------------------------------------------------------


def test_c01_an_attachers_exit_deletes_nothing(pool: CacheResidencyPool) -> None:
    """A stranger attaches, works and exits; the next one finds the same pool, unchanged."""
    program = """
import shmcache, sys
pool = shmcache.CacheResidencyPool.attach(sys.argv[1])
with pool.reserve(shmcache.CachePoolUsage(3)):
    print(pool.id)
"""
    with pool.reserve(CachePoolUsage(5)):
        before = pool.report()
        for _ in range(2):
            done = run("-c", program, pool.name)
            assert (done.returncode, done.stdout, done.stderr) == (0, f"{pool.id}\n", "")
            after = pool.report()
            assert after.current_device_bytes == before.current_device_bytes
            assert slots(pool) == set()


# A program with shared memory of its own by the standard library: one that it removes, and one that
# it forgets, which only a resource tracker in working order removes.
BOTH_KINDS = """
import multiprocessing, shmcache, sys
from multiprocessing import shared_memory

def work(name):
    own = shared_memory.SharedMemory(create=True, size=64)
    with shmcache.CacheResidencyPool.attach(name) as pool, pool.reserve(shmcache.CachePoolUsage(1)):
        own.buf[0] = 1
    own.close()
    own.unlink()

if __name__ == "__main__":
    kept = shared_memory.SharedMemory(create=True, size=64)
    forgotten = shared_memory.SharedMemory(create=True, size=64)
    context = multiprocessing.get_context("spawn")
    for _ in range(int(sys.argv[2])):
        workers = [context.Process(target=work, args=(sys.argv[1],)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * 4
    kept.unlink()
    print(forgotten.name)
"""


@pytest.mark.parametrize("rounds", [1, pytest.param(16, marks=pytest.mark.ci)])
@pytest.mark.watchdog(400)
def test_c04_the_resource_tracker_is_left_alone(
    pool: CacheResidencyPool, tmp_path: Path, rounds: int
) -> None:
    """It says nothing about the pool, and still does its duty for the program's own memory."""
    program = tmp_path / "both_kinds.py"
    program.write_text(BOTH_KINDS)
    before = pool.report()
    done = run(str(program), pool.name, str(rounds))
    assert done.returncode == 0, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    assert len(complaints) == 1, done.stderr
    assert "resource_tracker: There appear to be 1 leaked shared_memory" in complaints[0]
    assert not (SHM / done.stdout.strip()).exists()
    assert "Error" not in done.stderr
    pool.sweep()
    assert pool.report().current_device_bytes == before.current_device_bytes
    assert slots(pool) == set()


# ---- multiprocessing ---------------------------------------------------------------------------

METHODS = """
import multiprocessing, os, shmcache, sys

U = shmcache.CachePoolUsage
pool = None

def work(name, kept):
    mine = pool or shmcache.CacheResidencyPool.attach(name)
    if pool is not None:
        token.release()  # the parent's: nothing to a child
    keep = mine.reserve(U(kept))
    assert os.getpid() in [owner.pid for owner in mine.owners()]

def cannot_be_sent(thing, context):
    process = context.Process(target=work, args=(thing, 1))
    try:
        process.start()
    except TypeError:
        return True
    process.kill()
    process.join()
    return False

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    pool = shmcache.CacheResidencyPool.attach(sys.argv[1])
    token = pool.reserve(U(10))
    workers = [context.Process(target=work, args=(sys.argv[1], 3)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    pool.sweep()
    assert pool.report().current_device_bytes == 10, pool.report()
    assert [owner.pid for owner in pool.owners()].count(os.getpid()) == 1
    if sys.argv[2] != "fork":
        assert cannot_be_sent(pool, context)
        assert cannot_be_sent(token, context)
    print("ok")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(pool: CacheResidencyPool, tmp_path: Path, method: str) -> None:
    """Inherited or attached by name, a worker is an owner; handles and tokens are not sent."""
    program = tmp_path / "methods.py"
    program.write_text(METHODS)
    done = run(str(program), pool.name, method)
    assert (done.stdout, done.stderr) == ("ok\n", "")
    assert slots(pool) == set()
    assert pool.report().current_device_bytes == 0
    assert pool.verify().ok


# ---- how programs end --------------------------------------------------------------------------

ENDING = """
import os, shmcache, sys, threading
U = shmcache.CachePoolUsage
pool = shmcache.CacheResidencyPool.attach(sys.argv[1])
tokens = [pool.reserve(U(1)), pool.reserve_transfer(2), pool.register_manager(None)]
pool.update_manager(tokens[2].manager, U(disk_bytes=3))
def wait():
    try:
        pool.reserve(U(1000), timeout=None)
    except shmcache.SegmentError.Closed:
        pass  # by the end of the program
def serve(requests):
    for _ in range(requests):
        with pool.reserve(U(1)):
            pass
"""
ENDINGS = {
    "os._exit": ("os._exit(0)", 0, 3),
    "SIGKILL": ("os.kill(os.getpid(), 9)", -9, 3),
    "abort": ("os.abort()", -signal.SIGABRT, 3),
    "sys.exit": ("sys.exit(7)", 7, 0),
    "an exception": ("raise SystemError('meant')", 1, 0),
    "so many requests": ("serve(100)", 0, 0),
    "a thread waits": ("threading.Thread(target=wait, daemon=True).start(); serve(3)", 0, 0),
    "closed before": ("pool.close()", 0, 0),
    "closed, then _exit": ("pool.close(); os._exit(0)", 0, 0),
}


@pytest.mark.parametrize(("ending", "code", "left"), ENDINGS.values(), ids=ENDINGS)
def test_c33_how_a_worker_ends(pool: CacheResidencyPool, ending: str, code: int, left: int) -> None:
    """Exit code 0 does not mean clean; what hooks could not do, a sweep does."""
    done = run("-c", ENDING + ending, pool.name)
    assert done.returncode == code
    assert ("Error" in done.stderr) == ("meant" in ending), done.stderr
    assert bool(slots(pool)) == bool(left)
    assert [owner.entries for owner in pool.sweep()] == ([left] if left else [])
    report = pool.report()
    assert report.managers == 0
    assert report.current_device_bytes == report.current_transfer_in_flight_bytes == 0
    assert report.current_disk_bytes == 0
    assert pool.verify().ok


# ---- servers -----------------------------------------------------------------------------------


def test_preload_app(pool: CacheResidencyPool) -> None:
    """The handle is made at import, in the master; workers use it and say nothing about forks."""
    with Worker(FORKS) as master:
        master.call("attach(name)", name=pool.name)
        master.call("""
def worker():
    'Serves until it is killed; its pid once it holds 5 bytes.'
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = pool.reserve(U(5))
        os.write(here, b".")
        while True:
            signal.pause()
    os.read(there, 1)
    return pid
workers = [worker() for _ in range(4)]
""")
        workers = master.call("workers")
        assert slots(pool) == {master.pid, *workers}
        assert pool.report().current_device_bytes == 10 + 4 * 5
        os.kill(workers[0], signal.SIGKILL)
        wait_until(lambda: process_state(workers[0]) == "Z", "the worker dies")
        assert [owner.pid for owner in pool.sweep()] == [workers[0]]
        workers[0] = master.call("worker()")
        assert slots(pool) == {master.pid, *workers}
        assert pool.report().current_device_bytes == 10 + 4 * 5
        master.kill()  # orphaned workers go on serving: they are alive
        assert [owner.pid for owner in pool.sweep()] == [master.pid]
        assert pool.report().current_device_bytes == 4 * 5


def test_an_anonymous_pool_is_shared_with_forked_children() -> None:
    """One budget for the family; a dead child's share comes back when it is asked for."""
    with Worker(FORKS) as parent:
        parent.call("pool = shmcache.CacheResidencyPool(shmcache.CachePoolLimits(1000, 0, 1, 0))")
        parent.call("token = pool.reserve(U(600))")
        assert parent.call("""
def take():
    global kept
    kept = pool.reserve(U(400))
    return device(), attempt(lambda: pool.reserve(U(1)))
child(take)
""") == [1000, "CachePoolError.BudgetExceeded"]
        assert parent.call("device()") == 1000
        assert parent.call("pool.reserve(U(400)).usage.device_bytes") == 400
        assert parent.call("pool.verify().ok")


def test_an_anonymous_pool_lives_as_long_as_its_last_process(tmp_path: Path) -> None:
    """The creator is killed; its child is admitted within the same budget, and reclaims."""
    answer = tmp_path / "answer"
    with Worker(FORKS) as parent:
        parent.call("pool = shmcache.CacheResidencyPool(shmcache.CachePoolLimits(1000, 0, 1, 0))")
        parent.call(
            """
token = pool.reserve(U(1000))
there, here = os.pipe()
if os.fork() == 0:
    os.close(here)
    before = device()
    os.read(there, 1)  # the end of the parent
    with pool.reserve(U(700), timeout=30):
        text = f"{before} {device()}"
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)
    os._exit(0)
""",
            path=str(answer),
        )
        parent.kill()
        wait_until(answer.exists, "the child answers")
    assert answer.read_text() == "1000 700"


def test_a_supervisor_in_the_master_outlives_its_workers(pool: CacheResidencyPool) -> None:
    """Forked workers do not inherit the watching thread, and their deaths are noticed by it."""
    with Worker(FORKS) as master:
        master.call("attach(name); supervisor = shmcache.Supervisor(pool)", name=pool.name)
        master.call("supervisor.__enter__(); None")
        device = master.call("""
def take():
    global kept
    kept = pool.reserve(U(5))
    return device()
[child(take) for _ in range(5)][-1]
""")
        assert device >= 15
        wait_until(lambda: slots(pool) == {master.pid}, "the supervisor reclaims the dead")
        assert pool.report().current_device_bytes == 10
        master.call("supervisor.__exit__(None, None, None)")
