"""Whatever can go makes room: leases, withdrawn blocks and prefixes elsewhere are no excuse.

Why: which blocks the policy looks at first says little about the others, and a refusal while
something could go is a worker's request lost.
"""

from __future__ import annotations

import random

import pytest

import shmcache as sc

MIB = 1 << 20
SMALL = 64 << 10
PER_SLAB = 2 * MIB // SMALL
POLICIES = ["lru", "lfu", "adaptive"]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def filled(policy: str, slabs: int, parents: str = "none", **limits: int) -> sc.CacheResidencyPool:
    """An arena full of small published blocks, in order; `parents`: each is its successor's."""
    host = limits.get("host_bytes", 64 * MIB)
    pool = sc.CacheResidencyPool(
        sc.CachePoolLimits(1, host, 1, 0), arena_bytes=slabs * 2 * MIB, eviction=policy
    )
    parent = None
    for number in range(min(slabs * PER_SLAB, host // SMALL)):
        pool.allocate(SMALL).publish(key(number), parent=parent).lease.release()
        parent = key(number) if parents == "chain" else None
    return pool


def leased(pool: sc.CacheResidencyPool, numbers: list[int]) -> list[sc.Lease]:
    found = [pool.lookup(key(number)) for number in numbers]
    assert None not in found
    return [lease for lease in found if lease is not None]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_slab_that_can_be_emptied_is_found(policy: str, rng: random.Random) -> None:
    """One lease in every other slab, oldest blocks first: the only slab without any is emptied."""
    for empty in range(8):
        with filled(policy, 8) as pool:
            held = leased(
                pool,
                [slab * PER_SLAB + rng.randrange(PER_SLAB) for slab in range(8) if slab != empty],
            )
            pool.allocate(2 * MIB).release()
            with pytest.raises(sc.SegmentError.ArenaFull):
                _ = [pool.allocate(2 * MIB) for _ in range(2)]
            assert pool.verify().ok
            del held


@pytest.mark.parametrize("policy", POLICIES)
def test_withdrawn_blocks_that_nobody_reads_any_more_make_room(policy: str) -> None:
    """Also for another size."""
    with filled(policy, 4) as pool:
        numbers = [slab * PER_SLAB for slab in range(4)]
        held = leased(pool, numbers)
        assert pool.invalidate([key(number) for number in numbers]) == 4
        for lease in held:
            lease.release()
        kept = [pool.allocate(2 * MIB) for _ in range(4)]
        assert pool.verify().ok
        del kept


@pytest.mark.parametrize("policy", POLICIES)
def test_the_only_block_without_a_lease_is_found(policy: str, rng: random.Random) -> None:
    for _ in range(10):
        with filled(policy, 4) as pool:
            free = rng.randrange(4 * PER_SLAB)
            held = leased(pool, [number for number in range(4 * PER_SLAB) if number != free])
            pool.allocate(SMALL).release()
            assert not pool.contains(key(free))
            del held


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_mib", [8, 64])
def test_a_whole_prefix_goes_in_any_order_of_use(
    policy: str, host_mib: int, rng: random.Random
) -> None:
    """A parent that was looked at before its children had gone is looked at again."""
    for _ in range(5):
        with filled(policy, 4, "chain", host_bytes=host_mib * MIB) as pool:
            for number in rng.choices(range(4 * PER_SLAB), k=300):
                del leased(pool, [number])[:]
            pool.reserve(sc.CachePoolUsage(host_bytes=host_mib * MIB)).release()
            assert pool.arena_report().used_blocks == 0
            assert pool.verify().ok


def test_a_parent_is_a_block_of_the_same_pool() -> None:
    """Mutant: the number of a block of one pool is taken for one of another."""
    with filled("lru", 1) as pool, filled("lru", 1) as other:
        foreign = leased(other, [3])[0]
        pool.invalidate(key(0))
        block = pool.allocate(SMALL)
        with pytest.raises(ValueError, match="another pool"):
            block.publish(key(1000), parent=foreign)
        assert not pool.contains(key(1000))
        block.publish(key(1000)).lease.release()
        foreign.release()


@pytest.mark.parametrize(("chunk", "error"), [(0, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_a_prefault_checks_its_chunk(chunk: object, error: type[Exception]) -> None:
    with filled("lru", 1) as pool, pytest.raises(error, match="chunk_bytes"):
        pool.prefault(chunk_bytes=chunk)  # type: ignore[arg-type]
