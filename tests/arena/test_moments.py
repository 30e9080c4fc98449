"""Calls that are met half-way: by a signal handler, by another thread, by a fork.

Why: a call that waits for the lock has dropped the GIL and serves signals, and what other code does
to the same block, lease or pool at that moment must leave no wrong byte and no lost pin.
Method: another process holds the segment's lock, and sends the signal once this one sleeps for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import numpy as np
import pytest

import shmcache as sc
from tests.pool import raw
from tests.support import Worker, wait_until

MIB = 1 << 20
LIMITS = sc.CachePoolLimits(1, 512 * MIB, 1, 0)
HOLDER = """
import ctypes, os, signal
from shmcache.pool.names import segment_path
from tests.pool import raw
from tests.support import process_state, wait_until
def hold(name):
    global segment, unlock
    segment = raw.Segment(segment_path(name))
    libc = ctypes.CDLL(None)
    mutex = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(segment.bytes, 4096)))
    assert libc.pthread_mutex_lock(mutex) == 0
    unlock = lambda: libc.pthread_mutex_unlock(mutex)
def interrupt(pid):
    wait_until(lambda: process_state(pid) == "S", "the caller sleeps for the lock")
    os.kill(pid, signal.SIGUSR1)
"""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@contextlib.contextmanager
def in_the_middle(pool: sc.CacheResidencyPool, act: Callable[[], object]) -> Iterator[list[object]]:
    """`act` runs, once, inside the one call that the `with` block makes; what it answered."""
    answers: list[object] = []

    def handler(number: int, frame: FrameType | None) -> None:
        holder.finish()
        holder.call("unlock()")
        try:
            answers.append(act())
        except (BufferError, ValueError, sc.SegmentError) as error:
            answers.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with Worker(HOLDER) as holder:
            holder.call("hold(name)", name=pool.name)
            holder.begin("interrupt(pid)", pid=os.getpid())
            yield answers
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(answers) <= 1


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=4 * MIB) as made:
        yield made
        with sc.CacheResidencyPool.observe(pool_name) as observer:
            assert observer.verify().ok


@pytest.mark.parametrize("what", ["publish", "release"])
def test_a_block_that_is_changing_is_not_changed_twice(
    pool: sc.CacheResidencyPool, what: str
) -> None:
    """The first call decides; the count of what this process holds stays right."""
    block = pool.allocate(4096)
    act = block.release if what == "release" else lambda: block.publish(key(2))
    with in_the_middle(pool, act) as answers:
        result = block.publish(key(1))
    assert [type(answer) for answer in answers] == [ValueError]
    assert result.created
    assert pool.lookup(key(2)) is None
    block.release()
    for _ in range(100):  # a count below zero would ask for endless room
        pool.allocate(64).release()
    assert pool.arena_report().used_blocks == 1


def test_an_interrupted_publication_leaves_the_block(pool: sc.CacheResidencyPool) -> None:
    block = pool.allocate(4096)
    with pytest.raises(KeyboardInterrupt), in_the_middle(pool, interrupt):
        block.publish(key(1))
    assert pool.lookup(key(1)) is None
    block.array(np.uint8, 4096)[...] = 1
    assert block.publish(key(1)).created


def test_an_interrupted_withdrawal_of_a_damaged_block_releases_once(pool_name: str) -> None:
    """G3: a pin that is given back twice leaves the next lease without one."""
    with sc.CacheResidencyPool.create(
        pool_name, LIMITS, arena_bytes=2 * MIB, verify="always"
    ) as pool:
        for number in (1, 2):
            pool.allocate(4096).publish(key(number)).lease.release()
        for leases in (lambda: pool.lookup(key(1)), lambda: pool.match([key(2), key(1)])):
            with flipped(pool, 0), pytest.raises(KeyboardInterrupt), in_the_middle(pool, interrupt):
                leases()
            gc.collect()
            found = pool.lookup(key(1))
            assert found is not None
            stat = pool.stat(key(1))
            assert stat is not None
            assert stat.leased
            assert pool.evict(4096 * 2) <= 4096
            assert pool.contains(key(1))
            del found
            pool.allocate(4096).publish(key(2)).lease.release()


@contextlib.contextmanager
def flipped(pool: sc.CacheResidencyPool, offset: int) -> Iterator[None]:
    """A byte of the arena, damaged by a stranger."""
    with raw.Segment(pool.fileno()) as segment:
        place = len(segment.bytes) - pool.arena_report().arena_bytes + offset
        segment.bytes[place] ^= 1
        yield
        segment.bytes[place] ^= 1


def test_an_interrupted_close_keeps_what_views_show(pool: sc.CacheResidencyPool) -> None:
    """And no slot stays behind when the views have gone."""
    view = pool.allocate(4096).publish(key(1)).lease.array(np.uint8, 4096)
    with sc.CacheResidencyPool.attach(pool.name) as other:
        with pytest.raises(KeyboardInterrupt), in_the_middle(pool, interrupt):
            pool.close()
        assert other.evict(4096) == 0
        assert int(view.sum()) == 0
        del view
        gc.collect()
        assert other.evict(4096) == 4096
        assert len(other.owners()) == 1


# ---- forks -------------------------------------------------------------------------------------


def is_all(view: np.ndarray, value: int) -> bool:
    return bool((view == value).all())


def child_of(act: Callable[[], bool]) -> int:
    """The exit code of a forked child: 0 when `act` was true, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if act() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_s_views_are_right_wherever_memory_was_mapped(
    pool_name: str, rng: random.Random
) -> None:
    """Its own mappings must not take the addresses that its views look at."""

    def noise() -> list[mmap.mmap]:
        sizes = [rng.choice((1, 2, 8, 16, 64, 200)) * MIB for _ in range(rng.randrange(6))]
        return [mmap.mmap(-1, size) for size in sizes]

    for _ in range(25):
        before = noise()
        with sc.CacheResidencyPool.create(
            pool_name, LIMITS, arena_bytes=rng.choice((2, 8, 64)) * MIB
        ) as pool:
            view = pool.allocate(4096).publish(key(1)).lease.array(np.uint8, 4096)
            after = noise()
            del before[: rng.randrange(4)]
            more = noise()
            assert child_of(partial(is_all, view, 0)) == 0
            del view, after, more
        sc.CacheResidencyPool.destroy(pool_name)


def test_a_child_of_a_closed_pool_reads_the_views_that_are_left(
    pool: sc.CacheResidencyPool,
) -> None:
    block = pool.allocate(4096)
    block.array(np.uint8, 4096)[...] = 5
    view = block.publish(key(1)).lease.array(np.uint8, 4096)
    pool.close()
    assert child_of(lambda: bool((view == 5).all()) and pool.closed) == 0
    assert (view == 5).all()


@pytest.mark.parametrize("generations", [1, 2, 3])
@pytest.mark.parametrize("sealed", [False, True])
def test_what_a_child_may_not_see_does_not_forbid_its_later_leases(
    pool: sc.CacheResidencyPool, sealed: bool, generations: int
) -> None:
    """Nobody writes through what a child inherited, even once the block is published; a sealed one
    is leased by those who were forked after that.
    """
    view = pool.allocate(4096).publish(key(1)).lease.array(np.uint8, 4096)
    block = pool.allocate(4096)
    block.array(np.uint8, 4096)[...] = 7
    if sealed:
        block.seal()
    private = block.array(np.uint8, 4096)
    child_is_there, parent_is_done = os.pipe(), os.pipe()

    def read() -> bool:
        os.write(child_is_there[1], b"x")
        os.read(parent_is_done[0], 1)
        return descend(generations)

    def descend(depth: int) -> bool:
        lease = pool.lookup(key(2))
        right = lease is not None and bool((lease.array(np.uint8, 4096) == 7).all())
        right &= bool((view == 0).all())
        if depth > 1:
            mine = pool.allocate(4096)
            seen = mine.array(np.uint8, 4096)
            right &= child_of(lambda: descend(depth - 1)) == 0
            del seen
        else:
            right &= child_of(lambda: bool(private[0])) == (0 if sealed else -signal.SIGSEGV)
        return right

    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # a fault is expected
        os._exit(0 if read() else 1)
    os.read(child_is_there[0], 1)
    wait_until(lambda: len(pool.holdings()) == 2, "the child holds what its views show")
    kept, private = private, np.zeros(1)
    del kept
    block.publish(key(2)).lease.release()
    os.write(parent_is_done[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in (*child_is_there, *parent_is_done):
        os.close(fd)
