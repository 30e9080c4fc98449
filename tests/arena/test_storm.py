"""Four processes at full speed over an arena that is far too small, killed at random.

Every byte that is read is checked; an outsider verifies meanwhile; at the end nothing is held.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

import shmcache as sc

MIB = 1 << 20
WORKERS = 4
WRONG = 3  # exit code of a worker that read a byte nobody wrote there

WORKER = """
import random, sys
import numpy as np
import shmcache as sc
pool = sc.CacheResidencyPool.attach(sys.argv[1])
rng = random.Random(int(sys.argv[2]))
held = []
print("ready", flush=True)
while True:
    number = min(rng.randrange(1, 600), rng.randrange(1, 600))
    nbytes = (4096, 64 << 10, 1 << 20)[number % 3]
    key = number.to_bytes(32, "big")
    lease = pool.lookup(key)
    if lease is None:
        try:
            block = pool.allocate(nbytes)
        except (sc.SegmentError.ArenaFull, sc.CachePoolError.BudgetExceeded):
            held.clear()
            continue
        block.array(np.uint8, nbytes)[...] = number % 251
        lease = block.publish(key, parent=(number // 2).to_bytes(32, "big")).lease
    if lease.nbytes != nbytes or not (lease.array(np.uint8, nbytes) == number % 251).all():
        sys.exit(3)
    held.append(lease)
    if len(held) > 3:
        held.pop(rng.randrange(len(held)))
    if rng.random() < 0.01:
        pool.invalidate(key)
"""


def start(name: str, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, name, str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.ci)])
@pytest.mark.watchdog(300)
def test_no_wrong_byte_and_nothing_leaked(pool_name: str, rng: random.Random, seconds: int) -> None:
    limits = sc.CachePoolLimits(1, 16 * MIB, 1, 0)
    with (
        sc.CacheResidencyPool.create(pool_name, limits, arena_bytes=12 * MIB) as pool,
        sc.Supervisor(pool),
    ):
        workers = [start(pool_name, rng.getrandbits(32)) for _ in range(WORKERS)]
        try:
            kills = storm(pool, workers, rng, seconds)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
                assert worker.stdout is not None
                worker.stdout.close()
        pool.sweep()
        report = pool.arena_report()
        assert (report.private_bytes, report.leased_bytes) == (0, 0)
        assert pool.verify().ok
        assert pool.report().current_host_bytes == report.used_bytes <= 12 * MIB
        assert kills >= seconds // 2
        assert report.evicted > 100
        pool.evict(12 * MIB)
        assert pool.report().current_host_bytes == 0


def storm(
    pool: sc.CacheResidencyPool,
    workers: list[subprocess.Popen[bytes]],
    rng: random.Random,
    seconds: int,
) -> int:
    """Kill one worker after the other, as soon as it works; returns how many, a few at least."""
    until = time.monotonic() + seconds
    kills = 0
    while time.monotonic() < until or kills < seconds // 2:
        index = rng.randrange(WORKERS)
        worker = workers[index]
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"  # from here on it stores and reads
        busy_until = time.monotonic() + rng.random() / 5
        while time.monotonic() < busy_until:
            assert pool.verify().ok
        worker.kill()
        assert worker.wait() != WRONG
        worker.stdout.close()
        workers[index] = start(pool.name, rng.getrandbits(32))
        kills += 1
    return kills
