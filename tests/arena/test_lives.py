"""Leases and blocks in the life of a process: threads, exit, collection, signals, two handles."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import shmcache as sc

MIB = 1 << 20
LIMITS = sc.CachePoolLimits(1, 16 * MIB, 1, 0)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_threads_of_one_owner_race(pool_name: str) -> None:
    """Lookups, views, stores, withdrawals and collections of eight threads: no wrong byte."""
    wrong: list[object] = []

    def race(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(400):
                number = int(rng.integers(1, 40))
                lease = pool.lookup(key(number))
                if lease is None:
                    block = pool.allocate(64 << 10, timeout=30)
                    block.array(np.uint8, 64 << 10)[...] = number
                    lease = block.publish(key(number)).lease
                view = lease.array(np.uint8, 64 << 10)
                del lease
                if not (view == number).all():
                    wrong.append(number)
                if number == 7:
                    pool.invalidate(key(7))
        except BaseException as error:  # noqa: BLE001 (told by the main thread)
            wrong.append(error)

    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=2 * MIB) as pool:
        threads = [threading.Thread(target=race, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        gc.collect()
        report = pool.arena_report()
        assert (report.leased_bytes, report.private_bytes) == (0, 0)
        assert pool.verify().ok


EXITS = {
    "lease": "held = lease",
    "view": "held = lease.array('u1', 64)",
    "writable view": "held = block.array('u1', 64)",
    "in a cycle": "held = [lease, lease.memoryview(), block]; held.append(held)",
    "daemon thread": "t = threading.Thread(target=spin, daemon=True); t.start()",
}


@pytest.mark.parametrize("what", EXITS)
def test_an_exit_with_views_is_silent_and_leaks_nothing(pool_name: str, what: str) -> None:
    program = (
        "import sys, threading, shmcache as sc\n"
        "pool = sc.CacheResidencyPool.attach(sys.argv[1])\n"
        "lease = pool.allocate(64).publish(bytes(32)).lease\n"
        "block = pool.allocate(64)\n"
        "def spin():\n"
        "    while True:\n"
        "        try:\n"
        "            pool.lookup(bytes(32)).array('u1', 64)\n"
        "        except (sc.SegmentError.Closed, ValueError):\n"  # the exit closed it
        "            return\n"
        f"{EXITS[what]}\n"
    )
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=2 * MIB) as pool:
        command = [sys.executable, "-c", program, pool_name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        pool.sweep()
        report = pool.arena_report()
        assert (report.leased_bytes, report.private_bytes) == (0, 0)
        assert len(pool.owners()) == 1


def test_two_handles_of_one_process_are_two_owners(pool_name: str) -> None:
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=2 * MIB) as one:
        two = sc.CacheResidencyPool.attach(pool_name)
        lease = one.allocate(64).publish(key(1)).lease
        other = two.lookup(key(1))
        lease.release()
        assert one.evict(64) == 0
        two.close()
        assert other is not None
        with pytest.raises(ValueError, match="closed"):
            other.array(np.uint8, 1)
        assert one.evict(64) == 64


def test_a_retired_pool_s_views_go_on(pool_name: str) -> None:
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=2 * MIB)
    block = pool.allocate(64)
    block.memoryview()[:] = b"x" * 64
    view = block.publish(key(1)).lease.memoryview()
    sc.CacheResidencyPool.destroy(pool_name, force=True)
    assert not Path(f"/dev/shm/shmcache.{pool_name}").exists()
    with pytest.raises(sc.SegmentError.Retired):
        pool.lookup(key(1))
    pool.close()
    assert bytes(view) == b"x" * 64
