"""Blocks and leases as a user meets them: store, find, withdraw, make room, die."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import shmcache as sc
from tests.support import Worker, wait_until

MIB = 1 << 20
LIMITS = sc.CachePoolLimits(1, 64 * MIB, 1, 0)
SMALL = 64 << 10
IMPORTS = "import numpy as np\nimport shmcache as sc\nSMALL = 64 << 10"  # of workers that store


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store(pool: sc.CacheResidencyPool, number: int, nbytes: int = SMALL, **how: object) -> sc.Lease:
    """A published block whose every byte is its number."""
    block = pool.allocate(nbytes)
    block.array(np.uint8, nbytes)[...] = number
    return block.publish(key(number), **how).lease  # type: ignore[arg-type]


def holds(lease: sc.Lease | None, number: int) -> bool:
    return lease is not None and bytes(lease.memoryview()) == bytes([number]) * lease.nbytes


@pytest.fixture
def pool() -> Iterator[sc.CacheResidencyPool]:
    """Anonymous, eight slabs, sound at the end."""
    with sc.CacheResidencyPool(LIMITS, arena_bytes=16 * MIB, eviction="lru") as made:
        yield made
        assert made.verify().ok
        report = made.arena_report()
        assert made.report().current_host_bytes == report.used_bytes


# ---- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["seal", "publish", "release"])
def test_a_live_view_forbids_what_would_change_its_bytes(
    pool: sc.CacheResidencyPool, call: str
) -> None:
    block = pool.allocate(SMALL)
    view = block.array(np.float32, (128, 128))
    arguments = [key(1)] if call == "publish" else []
    with pytest.raises(BufferError):
        getattr(block, call)(*arguments)
    view[...] = 2  # and nothing has changed
    assert not pool.contains(key(1))
    del view
    getattr(block, call)(*arguments)


def test_a_sealed_block_is_read_only_and_private(pool: sc.CacheResidencyPool) -> None:
    block = pool.allocate(100)
    block.memoryview()[:] = b"x" * 100
    block.seal()
    assert not block.array(np.uint8, 100).flags.writeable
    assert pool.arena_report().private_bytes == block.capacity == 128
    assert holds(block.publish(key(1)).lease, ord("x"))


def test_the_second_of_a_key_yields(pool: sc.CacheResidencyPool) -> None:
    first = store(pool, 7)
    used = pool.report().current_host_bytes
    block = pool.allocate(SMALL)
    result = block.publish(key(7))
    assert (result.created, result.lease.block) == (False, first.block)
    assert pool.report().current_host_bytes == used
    with pytest.raises(ValueError, match="released"):
        block.publish(key(8))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "<f2", "c16", "u1"])
def test_any_plain_dtype_lies_in_a_block(pool: sc.CacheResidencyPool, dtype: object) -> None:
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    block = pool.allocate(24 * kind.itemsize)
    block.array(kind, (2, 3, 4))[...] = 1
    with block.publish(key(1)).lease as lease:
        assert lease.array(kind, (2, 3, 4)).astype(complex).sum() == 24
        with pytest.raises(ValueError, match="does not fit"):
            lease.array(kind, 25)
        with pytest.raises(TypeError):
            lease.array(object, 1)


@pytest.mark.parametrize(
    ("bad", "error"),
    [(0, ValueError), (-1, ValueError), (1.0, TypeError), (3 * MIB, sc.SegmentError.BlockTooLarge)],
)
def test_impossible_sizes_are_refused(
    pool: sc.CacheResidencyPool, bad: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        pool.allocate(bad)


@pytest.mark.parametrize("bad", [b"", b"x" * 31, b"x" * 33, "x" * 32, 5, None])
def test_impossible_keys_are_refused(pool: sc.CacheResidencyPool, bad: bytes) -> None:
    for call in (pool.lookup, pool.contains, pool.claim, pool.allocate(1).publish):
        with pytest.raises((ValueError, TypeError)):
            call(bad)


def test_a_reservation_becomes_the_block(pool: sc.CacheResidencyPool) -> None:
    reservation = pool.reserve(sc.CachePoolUsage(host_bytes=SMALL))
    with pool.allocate(SMALL, reservation=reservation) as block:
        assert reservation.released
        assert pool.report().current_host_bytes == block.capacity == SMALL
    with pytest.raises(ValueError, match="released"):
        pool.allocate(SMALL, reservation=reservation)


# ---- leases ------------------------------------------------------------------------------------


def test_match_leases_the_longest_run(pool: sc.CacheResidencyPool) -> None:
    for number in (1, 2, 4):
        store(pool, number)
    keys = np.frombuffer(b"".join(key(n) for n in (1, 2, 3, 4)), np.uint8).reshape(-1, 32)
    with pool.match(keys) as run:
        assert len(run) == 2
        assert [int(array[0]) for array in run.arrays(np.uint8, SMALL)] == [1, 2]
        with pytest.raises(IndexError):
            run.array(2, np.uint8, 1)
    assert len(pool.match([])) == 0


def test_a_view_outlives_lease_pool_and_close() -> None:
    pool = sc.CacheResidencyPool(LIMITS, arena_bytes=2 * MIB, blocks_max=1)
    view = store(pool, 5).array(np.uint8, SMALL)
    observer = pool.owners()[0].pid
    pool.close()
    gc.collect()
    assert (view == 5).all()
    assert observer == os.getpid()


def test_a_view_that_was_alive_at_the_fork_is_the_child_s_too(pool_name: str) -> None:
    """Its own pin: the parent lets go, and the block stays as long as the child reads."""
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=2 * MIB, blocks_max=1) as pool:
        lease = store(pool, 3)
        view = lease.array(np.uint8, SMALL)
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(here, 1)
            os._exit(0 if bool((view == 3).all()) else 1)
        wait_until(lambda: len(pool.holdings()) == 2, "the child leases what its view shows")
        del view
        lease.release()
        with pytest.raises(sc.SegmentError.ArenaFull):
            pool.allocate(SMALL)
        os.write(there, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pool.allocate(SMALL, timeout=10).release()
        os.close(here)
        os.close(there)


def test_other_libraries_read_without_a_copy(pool: sc.CacheResidencyPool) -> None:
    """DLPack, of the lease and of its arrays; the view keeps the lease."""
    lease = store(pool, 1, 64)
    for source in (lease, lease.array(np.uint8, 64)):
        view = np.from_dlpack(source)
        assert (view == 1).all()
        with pytest.raises(BufferError):
            lease.release()
        del view, source
    lease.release()


def test_torch_reads_without_a_copy(pool: sc.CacheResidencyPool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    lease = store(pool, 1, 64)
    tensor = torch.from_dlpack(lease.array(np.uint8, 64))
    assert int(tensor.sum()) == 64
    half = torch.frombuffer(lease.memoryview(), dtype=torch.bfloat16)
    assert half.shape == (32,)
    with pytest.raises(BufferError):
        lease.release()


JAX_READS = """
import jax, ml_dtypes, shmcache as sc
limits = sc.CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 0)
with sc.CacheResidencyPool(limits, arena_bytes=1 << 18) as pool:
    block = pool.allocate(64)
    block.memoryview()[:] = bytes(range(64))
    block.publish(bytes(32))
    lease = pool.lookup(bytes(32))
    view = lease.array(ml_dtypes.bfloat16, 32)
    array = jax.device_put(view, jax.devices("cpu")[0])
    assert array.unsafe_buffer_pointer() == view.ctypes.data
    assert array.dtype == view.dtype
    del view
    for refused in (lease.release, lambda: jax.dlpack.from_dlpack(lease)):
        try:
            refused()
        except BufferError:
            continue
        raise AssertionError("it was not refused")
    del array
"""


def test_jax_reads_without_a_copy() -> None:
    """By `device_put` of a view: it takes no DLPack capsule of memory that is read-only.

    In a process of its own: jax starts threads, and other tests of this file fork.
    """
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    done = subprocess.run([sys.executable, "-c", JAX_READS], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()


def test_nobody_writes_through_a_lease(pool: sc.CacheResidencyPool) -> None:
    import ctypes

    address = store(pool, 1).array(np.uint8, SMALL).ctypes.data
    lease = pool.lookup(key(1))
    assert lease is not None
    child = os.fork()
    if child == 0:
        ctypes.memset(address, 0, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_a_withdrawn_block_is_read_on_and_then_gone(pool: sc.CacheResidencyPool) -> None:
    lease = store(pool, 9)
    assert pool.invalidate([key(9), key(10)]) == 1
    assert pool.lookup(key(9)) is None
    assert holds(lease, 9)
    assert pool.arena_report().doomed_bytes == SMALL
    lease.release()
    pool.evict(1)
    assert pool.arena_report().used_bytes == 0


# ---- room --------------------------------------------------------------------------------------


def test_sizes_make_room_for_each_other(pool: sc.CacheResidencyPool) -> None:
    for number in range(16 * MIB // SMALL):
        store(pool, number % 251, SMALL) if number < 251 else pool.allocate(SMALL).publish(
            key(number)
        )
    large = pool.allocate(2 * MIB)
    assert large.capacity == 2 * MIB
    large.publish(key(1000))
    for number in range(2000, 2000 + 8):
        pool.allocate(2 * MIB).publish(key(number))
    for number in range(3000, 3000 + 32):
        pool.allocate(SMALL).publish(key(number))
    assert pool.contains(key(3031))
    assert pool.arena_report().slabs_moved >= 8


def test_children_go_before_their_parents(pool: sc.CacheResidencyPool) -> None:
    parent: sc.Lease | None = None
    for number in range(1, 5):
        parent = store(pool, number, parent=parent)
    del parent
    for left in (3, 2, 1, 0):
        assert pool.evict(1) == SMALL
        assert len(pool.match([key(n) for n in range(1, 5)])) == left


def test_protected_blocks_stay(pool: sc.CacheResidencyPool) -> None:
    store(pool, 1, protected=True)
    assert pool.evict(MIB) == 0
    assert pool.unprotect(key(1)) == 1
    assert pool.evict(MIB) == SMALL


def test_a_full_arena_names_its_holders(pool: sc.CacheResidencyPool) -> None:
    held = [pool.allocate(2 * MIB) for _ in range(8)]
    with pytest.raises(sc.SegmentError.ArenaFull) as full:
        pool.allocate(1)
    assert full.value.holders == ((os.getpid(), 16 * MIB),)
    held.pop()
    pool.allocate(1)


def test_a_reservation_evicts_before_it_is_refused() -> None:
    limits = sc.CachePoolLimits(1, 4 * MIB, 1, 0)
    with sc.CacheResidencyPool(limits, arena_bytes=4 * MIB) as pool:
        for number in range(64):
            store(pool, number)
        lease = pool.lookup(key(5))
        with pool.reserve(sc.CachePoolUsage(host_bytes=3 * MIB)):
            assert pool.report().current_host_bytes <= 4 * MIB
            assert holds(lease, 5)
        with pytest.raises(sc.CachePoolError.BudgetExceeded):
            pool.reserve(sc.CachePoolUsage(host_bytes=4 * MIB))


def test_a_wait_ends_with_the_last_lease(pool_name: str) -> None:
    options = {"arena_bytes": 2 * MIB, "blocks_max": 1}
    with (
        sc.CacheResidencyPool.create(pool_name, LIMITS, **options) as pool,
        Worker("import shmcache as sc") as worker,
    ):
        lease = store(pool, 1)
        worker.call("pool = sc.CacheResidencyPool.attach(name)", name=pool_name)
        worker.begin("block = pool.allocate(100, timeout=60)")
        lease.release()
        worker.finish()
        worker.call("block.release()")


@pytest.mark.parametrize("verify", ["first", "always"])
def test_damaged_bytes_are_a_miss(pool_name: str, verify: str) -> None:
    with sc.CacheResidencyPool.create(
        pool_name, LIMITS, arena_bytes=2 * MIB, verify=verify
    ) as pool:
        store(pool, 1).release()
        with open(f"/dev/shm/shmcache.{pool_name}", "r+b") as file:
            total, arena_at, *_ = pool._facts()
            file.seek(arena_at + 17)
            file.write(b"\xff")
        assert total > arena_at
        assert pool.lookup(key(1)) is None
        assert not pool.contains(key(1))
        assert pool.arena_report().bad_checksums == 1


def test_watermarks_keep_room(pool_name: str) -> None:
    options = {"arena_bytes": 4 * MIB, "watermarks": (0.25, 0.5)}
    with sc.CacheResidencyPool.create(pool_name, LIMITS, **options) as pool, sc.Supervisor(pool):
        for number in range(64):
            store(pool, number)
        wait_until(lambda: pool.arena_report().used_bytes <= 2 * MIB, "half is free")


# ---- claims and deaths -------------------------------------------------------------------------


def test_a_claim_passes_on_when_its_holder_dies(pool_name: str) -> None:
    with (
        sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=2 * MIB) as pool,
        Worker("import shmcache as sc") as worker,
    ):
        worker.call("pool = sc.CacheResidencyPool.attach(name)", name=pool_name)
        worker.call("claim = pool.claim(bytes(32))")
        assert pool.claim(bytes(32)) is None
        worker.kill()
        assert isinstance(pool.claim(bytes(32), timeout=30), sc.Claim)


def test_a_claim_ends_with_the_block(pool: sc.CacheResidencyPool) -> None:
    claim = pool.claim(key(1))
    assert isinstance(claim, sc.Claim)
    assert pool.claim(key(1)) is None
    lease = store(pool, 1)
    assert isinstance(pool.claim(key(1)), sc.Lease)
    claim.release()
    assert holds(lease, 1)


def test_what_was_published_survives_everybody(pool_name: str) -> None:
    """G7: all are killed, holding leases and half-written blocks; the next one hits all of it."""
    sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=4 * MIB).close()
    with (
        Worker(IMPORTS, key, store) as first,
        Worker(IMPORTS, key, store) as second,
    ):
        for worker, start in ((first, 1), (second, 21)):
            worker.call("pool = sc.CacheResidencyPool.attach(name)", name=pool_name)
            worker.call("held = [store(pool, n) for n in range(start, start + 20)]", start=start)
            worker.call("writing = pool.allocate(SMALL)")
        first.kill()
        second.kill()
    with sc.CacheResidencyPool.attach(pool_name) as pool:
        numbers = [*range(1, 21), *range(21, 41)]
        assert all(holds(pool.lookup(key(number)), number) for number in numbers)
        report = pool.arena_report()
        assert (report.private_bytes, report.leased_bytes) == (0, 0)
        assert pool.verify().ok
