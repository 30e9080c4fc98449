"""Published reports of lost, leaked and wrong blocks elsewhere, as cases that must not happen here.

Each test carries the number of its case; the others of the log that concern blocks are told, with
the same numbers, where they are tested: kills at every instruction in tests/crash (C03, C21), room
on the host in tests/pool and tests/process (C09, C26, C28), wrong layouts in tests/policy (C17).
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import shmcache as sc
from tests.support import Worker

MIB = 1 << 20
SMALL = 64 << 10
LIMITS = sc.CachePoolLimits(1, 64 * MIB, 1, 0)
WORKER = """
import numpy as np
import shmcache as sc
def key(number):
    return number.to_bytes(32, "big")
def attach(name):
    global pool, held
    pool, held = sc.CacheResidencyPool.attach(name), []
def store(number, nbytes=64 << 10):
    block = pool.allocate(nbytes)
    block.array(np.uint8, nbytes)[...] = number
    return block.publish(key(number)).lease
"""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store(pool: sc.CacheResidencyPool, number: int) -> sc.Lease:
    block = pool.allocate(SMALL)
    block.array(np.uint8, SMALL)[...] = number
    return block.publish(key(number)).lease


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    """Room for eight blocks; sound at the end, with nothing charged that is not there."""
    with sc.CacheResidencyPool.create(
        pool_name, LIMITS, arena_bytes=8 * SMALL, block_bytes_max=SMALL
    ) as made:
        yield made
        gc.collect()
        assert made.verify().ok
        assert made.report().current_host_bytes == made.arena_report().used_bytes


@pytest.fixture
def worker(pool: sc.CacheResidencyPool) -> Iterator[Worker]:
    with Worker(WORKER) as made:
        made.call("attach(name)", name=pool.name)
        yield made


def test_c12_a_dead_reader_holds_up_no_writer(pool: sc.CacheResidencyPool, worker: Worker) -> None:
    """Every block leased by one who is killed: the next allocation sweeps, and goes on."""
    worker.call("held += [store(number) for number in range(8)]")
    with pytest.raises(sc.SegmentError.ArenaFull) as full:
        pool.allocate(SMALL)
    assert full.value.holders == ((worker.pid, 8 * SMALL),)
    worker.kill()
    pool.allocate(SMALL).release()


def test_c15_a_lease_is_given_back_once(pool: sc.CacheResidencyPool) -> None:
    """Two threads, again, then its end: another lease of the same process keeps the block."""
    store(pool, 1).release()
    kept = pool.lookup(key(1))
    for _ in range(2000):
        lease = pool.lookup(key(1))
        assert lease is not None
        threads = [threading.Thread(target=lease.release) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lease.release()
        del lease
    assert kept is not None
    assert pool.evict(SMALL) == 0
    kept.release()
    assert pool.evict(SMALL) == SMALL


def test_c16_a_lease_nobody_uses_ends_with_its_frame(pool: sc.CacheResidencyPool) -> None:
    """An exception between a lookup and its use, an abandoned generator, a cycle."""

    def fail() -> None:
        lease, run = pool.lookup(key(1)), pool.match([key(1), key(2)])
        raise RuntimeError(str((lease, run)))

    def read() -> Iterator[object]:
        lease = pool.lookup(key(2))
        yield lease

    store(pool, 1).release()
    store(pool, 2).release()
    with pytest.raises(RuntimeError):
        fail()
    next(read())
    cycle: list[object] = [pool.lookup(key(1))]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.evict(2 * SMALL) == 2 * SMALL


def test_c18_a_slow_reader_s_bytes_stay(pool: sc.CacheResidencyPool, worker: Worker) -> None:
    """A stopped process is no dead one: nothing expires, whatever others store meanwhile."""
    worker.call("lease = store(7); view = lease.array(np.uint8, 64 << 10)")
    worker.stop()
    pool.invalidate(key(7))
    for number in range(8, 40):
        store(pool, number).release()
        pool.sweep()
    worker.cont()
    assert worker.call("bool((view == 7).all())")
    assert worker.call("store(7).nbytes") == SMALL


def test_c20_one_death_takes_only_its_own(pool: sc.CacheResidencyPool, worker: Worker) -> None:
    with Worker(WORKER) as other:
        other.call("attach(name)", name=pool.name)
        worker.call("held += [store(1), store(2), pool.allocate(64 << 10)]")
        other.call("held += [pool.lookup(key(1)), pool.allocate(64 << 10)]")
        mine = pool.lookup(key(2))
        worker.kill()
        pool.sweep()
        assert other.call("bytes(held[0].memoryview()) == bytes([1]) * (64 << 10)")
        assert mine is not None
        assert bytes(mine.memoryview()) == bytes([2]) * SMALL
        assert {row.pid: row.private_blocks for row in pool.holdings()}[other.pid] == 1
        assert pool.arena_report().used_blocks == 3


def test_c21_a_killed_taker_loses_no_block(
    pool: sc.CacheResidencyPool, worker: Worker, rng: random.Random
) -> None:
    """At any moment; at every instruction it is in tests/crash."""
    for _ in range(10):
        with Worker(WORKER) as taker:
            taker.call("attach(name)", name=pool.name)
            taker.begin("while True: pool.allocate(rng_bytes).release()", rng_bytes=SMALL)
            for _ in range(rng.randrange(200)):
                pool.report()
            taker.kill()
    held = [pool.allocate(SMALL) for _ in range(8)]
    assert pool.arena_report().used_blocks == 8
    del held


def test_c37_a_child_s_end_gives_back_no_lease_of_its_parent(
    pool: sc.CacheResidencyPool, worker: Worker
) -> None:
    """With a view that was alive at the fork, and without."""
    worker.call("held += [store(1), store(2)]; view = held[1].array(np.uint8, 8)")
    code = worker.call(
        "import os, sys, gc\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for lease in held: view = None; lease.release()\n"
        "    held.clear(); gc.collect(); pool.close(); os._exit(0)\n"
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    )
    assert code == 0
    pool.sweep()
    assert pool.evict(8 * SMALL) == 0
    worker.call("view = None; held.clear()")
    assert pool.evict(8 * SMALL) == 2 * SMALL


def test_c43_damage_is_told_to_all_and_hangs_nobody(pool_name: str) -> None:
    """What is leased may be given back in silence."""
    made = sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=2 * MIB)
    with Worker(WORKER) as worker:
        worker.call("attach(name); held.append(store(1))", name=pool_name)
        lease = made.lookup(key(1))
        worker.call(
            "import mmap, struct\n"
            "m = mmap.mmap(pool.fileno(), 0)\n"
            "(at,) = struct.unpack_from('=Q', m, 216 + 8 * 3)\n"
            "m[at : at + 32] = b'\\xff' * 32"
        )
        assert not made.verify().ok
        for call in (lambda: made.lookup(key(1)), lambda: made.allocate(64)):
            with pytest.raises(sc.CachePoolError.Poisoned):
                call()
        assert lease is not None
        assert lease.memoryview()[0] == 1
        lease.release()
        assert worker.call("held.clear()") is None
    made.close()
