"""Groups of workers that are told to go twice, as impatient operators and orchestrators do.

Why: the second signal finds a worker in the middle of leaving, with the default action restored.
"""

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from shmcache import CacheResidencyPool
from tests.process.scenes import LIMITS, slots
from tests.support import Worker

GROUP = """
import os, select, shmcache, signal, sys
from shmcache import CachePoolUsage as U

def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so the second one ends it wherever it is
    pool.close()
    os._exit(0)

def member(name):
    global pool
    signal.signal(signal.SIGTERM, leave)
    pool = shmcache.CacheResidencyPool.open_or_create(name, limits())
    tokens = [pool.reserve(U(1)) for _ in range(100)]
    os.write(ready, b".")
    while True:  # not pause(): both signals may have come just before it, and it would sleep on
        select.select([], [], [], 0.01)

def limits():
    return shmcache.CachePoolLimits(1000, 0, 1000, 1000)

def start_group(name, members):
    'Forked workers in a process group of their own; returns it when all are attached.'
    global ready, group
    there, ready = os.pipe()
    group = 0
    for _ in range(members):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, group)
            try:
                member(name)
            finally:
                os._exit(1)
        group = group or pid
        os.setpgid(pid, group)
    os.close(ready)
    got = 0
    while got < members:
        read = len(os.read(there, members))
        assert read, "a member ended early"
        got += read
    os.close(there)
    return group

def reap_group():
    'Exit codes, sorted.'
    codes = []
    while True:
        try:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(-group, 0)[1]))
        except ChildProcessError:
            return sorted(codes)
"""


def second_signal(name: str, driver: Worker, rng: random.Random, runs: int) -> None:
    for _ in range(runs):
        group = driver.call("start_group(name, 4)", name=name)
        os.killpg(group, signal.SIGTERM)
        threading.Event().wait(rng.uniform(0, 0.002))  # anywhere in the teardown, or after it
        os.killpg(group, signal.SIGTERM)
        assert set(driver.step("reap_group")) <= {0, -signal.SIGTERM}
        with CacheResidencyPool.open_or_create(name, LIMITS) as pool:
            pool.sweep()
            assert pool.report().current_device_bytes == 0
            assert slots(pool) == set()
            assert pool.verify().ok
        found = [path for path in Path("/dev/shm").iterdir() if name in path.name]
        assert len(found) == 1


def test_c22_a_second_sigterm_during_teardown(pool_name: str, rng: random.Random) -> None:
    """A group is told to go twice; nothing is half removed, nothing stays charged."""
    with Worker(GROUP) as driver:
        second_signal(pool_name, driver, rng, 15)


@pytest.mark.ci
def test_c22_many_second_signals(pool_name: str, rng: random.Random) -> None:
    """The same 200 times."""
    with Worker(GROUP) as driver:
        second_signal(pool_name, driver, rng, 200)
