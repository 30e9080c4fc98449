"""Blocks and leases whose calls meet a held lock, or let other threads run in the middle.

The lock's holder is a stopped worker, as in tests/pool/test_held_lock.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import shmcache as sc
from shmcache import _core
from shmcache.pool.names import segment_path
from tests.support import Worker, wait_until

MIB = 1 << 20
LIMITS = sc.CachePoolLimits(1, 16 * MIB, 1, 0)
KEY = bytes(31) + b"1"


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    with sc.CacheResidencyPool.create(
        pool_name, LIMITS, arena_bytes=2 * MIB, verify="always"
    ) as pool:
        yield pool


@pytest.fixture
def holder(pool: sc.CacheResidencyPool) -> Iterator[Worker]:
    """A process that can take the lock of `pool`, and be stopped."""
    with Worker("from tests.pool.raw import Lock") as worker:
        worker.call("lock = Lock(path)", path=str(segment_path(pool.name)))
        yield worker


def hold(holder: Worker) -> None:
    holder.call("lock.take()")
    holder.stop()


def let_go(holder: Worker) -> None:
    holder.begin("lock.give()")
    holder.cont()
    holder.finish()


@pytest.mark.parametrize("find", ["lookup", "match"])
def test_a_damaged_block_that_cannot_be_withdrawn_is_released_once(
    pool: sc.CacheResidencyPool, holder: Worker, monkeypatch: pytest.MonkeyPatch, find: str
) -> None:
    """A lease taken before the damage goes on to hold the block, whatever a later lookup meets."""
    kept = pool.allocate(4096).publish(KEY).lease
    with segment_path(pool.name).open("r+b") as file:
        file.seek(pool._facts()[1] + 17)
        file.write(b"\xff")
    monkeypatch.setattr(_core, "LOCK_DEADLINE_NS", 60_000_000)
    hold(holder)
    with pytest.raises(sc.SegmentError.LockHeld):
        pool.lookup(KEY) if find == "lookup" else pool.match([KEY])
    let_go(holder)
    assert pool.invalidate(KEY) == 1
    assert pool.arena_report().doomed_bytes == 4096
    kept.release()
    assert pool.evict(1) == 4096


@pytest.mark.parametrize("step", ["seal", "publish"])
def test_no_view_appears_while_another_thread_makes_the_bytes_immutable(
    pool: sc.CacheResidencyPool, holder: Worker, step: str
) -> None:
    """The thread waits for the lock, and lets others run, after it has looked for views."""
    block = pool.allocate(4096)
    steps: dict[str, Callable[[], object]] = {
        "seal": block.seal,
        "publish": lambda: block.publish(KEY),
    }
    hold(holder)
    thread = threading.Thread(target=steps[step])
    thread.start()
    wait_until(lambda: "busy" in repr(block), f"{step} begins")
    for call in (
        lambda: block.array(np.uint8, 4096),
        block.memoryview,
        block.release,
        lambda: block.publish(KEY),
    ):
        with pytest.raises(ValueError, match="another thread"):
            call()
    let_go(holder)
    thread.join()
    assert block.sealed == (step == "seal")
    assert block.released == (step == "publish")
    assert pool.verify().ok


def test_a_close_waits_for_a_checksum() -> None:
    """In a process of its own, for one that did not wait would end by a signal."""

    def close_in_the_middle(nbytes: int) -> bool:
        pool = sc.CacheResidencyPool(
            sc.CachePoolLimits(1, nbytes, 1, 0),
            arena_bytes=nbytes,
            block_bytes_max=nbytes,
            verify="first",
        )
        block = pool.allocate(nbytes)
        block.memoryview()[:] = bytes(nbytes)
        publish = threading.Thread(target=block.publish, args=(bytes(32),))
        publish.start()
        while "busy" not in repr(block) and publish.is_alive():
            pass
        pool.close()
        publish.join()
        return pool.closed

    with Worker(
        "import threading, shmcache as sc",
        "threading.excepthook = lambda _: None",  # Closed, as a rule
        close_in_the_middle,
    ) as worker:
        assert worker.call(f"close_in_the_middle({64 * MIB})")
