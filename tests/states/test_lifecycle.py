"""The lifecycle's worked examples and checks L1 to L17."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from shmcache.bounds import U64_MAX, USIZE_MAX
from shmcache.errors import CacheLifecycleError
from shmcache.states.lifecycle import CacheBlockLifecycle, CacheEvictionPolicy, MutableCacheTail
from tests.states.blocks import KEY_VALUE, LATENT, block, rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmcache.policy.identity import CacheBlockId

LRU = CacheEvictionPolicy.LEAST_RECENTLY_USED
LFU = CacheEvictionPolicy.LEAST_FREQUENTLY_USED
TAIL = MutableCacheTail(24, 3)


def lifecycle_of(*ids: CacheBlockId, protected: bool = False) -> CacheBlockLifecycle:
    lifecycle = CacheBlockLifecycle()
    for id in ids:
        lifecycle.insert(id, protected)
    return lifecycle


def access(lifecycle: CacheBlockLifecycle, id: CacheBlockId, times: int = 1) -> None:
    for _ in range(times):
        lifecycle.acquire(id)
        lifecycle.release(id)


def state(lifecycle: CacheBlockLifecycle) -> tuple[Any, ...]:
    """All that a lifecycle knows."""
    records = {id: msgspec.structs.astuple(record) for id, record in lifecycle._blocks.items()}
    return lifecycle._access_clock, records, dict(lifecycle._tails)


def refused(
    lifecycle: CacheBlockLifecycle, error: CacheLifecycleError, call: Callable[[], object]
) -> None:
    """`call` raises exactly `error` and changes nothing (L8)."""
    before = copy.deepcopy(state(lifecycle))
    with pytest.raises(CacheLifecycleError) as caught:
        call()
    assert caught.value == error
    assert state(lifecycle) == before


# Examples -----------------------------------------------------------------------------------------

A, B, C, D = (block(3, start, start + 8) for start in (0, 8, 16, 24))


@pytest.fixture
def example_a() -> CacheBlockLifecycle:
    lifecycle = lifecycle_of(A, B, C, D)
    access(lifecycle, A, times=3)
    access(lifecycle, B)
    access(lifecycle, C)
    return lifecycle


def test_l1_order_of_access(example_a: CacheBlockLifecycle) -> None:
    records = example_a._blocks
    seen = [(r.leases, r.access_count, r.last_access) for r in map(records.get, (A, B, C, D)) if r]
    assert seen == [(0, 3, 7), (0, 1, 8), (0, 1, 9), (0, 0, 4)]
    assert example_a._access_clock == 9


@pytest.mark.parametrize(
    ("candidates", "required", "window", "lru", "lfu"),
    [
        ((A, B, C, D), None, 1, A, B),
        ((A, B, C, D), A, 1, B, B),
        ((A, B, C, D), None, 0, D, D),
        ((A, B, C, D), None, 4, None, None),
        ((A, B), None, 1, A, A),
        ((A, A, B, A), None, 1, A, A),
        ((), None, 1, None, None),
        ((A, B, C, D), None, USIZE_MAX, None, None),
        ((A, B, C, D), block(8, 0, 1), 1, A, B),  # required need not be registered
    ],
)
def test_l1_victims(
    example_a: CacheBlockLifecycle,
    candidates: tuple[CacheBlockId, ...],
    required: CacheBlockId | None,
    window: int,
    lru: CacheBlockId | None,
    lfu: CacheBlockId | None,
) -> None:
    before = copy.deepcopy(state(example_a))
    for policy, victim in ((LRU, lru), (LFU, lfu)):
        for _ in range(2):
            choice = example_a.eviction_candidate(iter(candidates), required, window, policy)
            assert choice == victim
    assert state(example_a) == before


def test_l2_protected_blocks_hold_places_when_choosing_and_not_when_counting() -> None:
    q, r, s = block(0, 4, 8), block(0, 8, 12), block(0, 12, 16)
    lifecycle = lifecycle_of(q, r)
    lifecycle.insert(s, True)
    assert lifecycle.eviction_candidate({q, r, s}, None, 1, LRU) == q
    assert lifecycle.eviction_candidate({q, r, s}, q, 1, LRU) == r
    assert lifecycle.recent_protection_counts({q, r, s}, 1) == {0: 1}
    assert lifecycle.recent_protection_counts({q, r, s}, 3) == {0: 2}
    assert lifecycle.recent_protection_counts({s}, 3) == {}
    assert lifecycle.eviction_candidate({q, r}, q, 1, LRU) is None  # r is the one counted


def test_l3_a_leased_block_holds_its_place() -> None:
    x, y = block(0, 0, 2), block(0, 2, 4)
    lifecycle = lifecycle_of(x, y)
    lifecycle.acquire(y)
    assert lifecycle.eviction_candidate([x, y], None, 1, LRU) == x
    assert lifecycle.recent_protection_counts([x, y], 1) == {0: 1}


def test_l3_the_layer_is_the_only_group() -> None:
    k, m = block(2, 0, 4), block(2, 4, 8, representation=LATENT)
    lifecycle = lifecycle_of(k, m)
    assert lifecycle.eviction_candidate([k, m], None, 1, LRU) == k
    other = block(1, 4, 8, session=77, rank=rank(1, 2, 3))
    lifecycle.insert(other, False)
    assert lifecycle.recent_protection_counts([k, m, other], 2) == {1: 1, 2: 2}
    assert list(lifecycle.recent_protection_counts([k, m, other], 9)) == [1, 2]


E0, E1, E2 = block(5, 0, 16), block(5, 16, 32), block(5, 32, 48)
SHORT = block(5, 16, 20)


def test_l4_truncation_consumes_the_lease() -> None:
    lifecycle = lifecycle_of(E0, E1, E2)
    lifecycle.acquire(E1)
    lifecycle.replace([(E1, 1), (E2, 0)], (SHORT, False), 5, MutableCacheTail(0, 20))
    assert set(lifecycle._blocks) == {E0, SHORT}
    assert lifecycle.lease_count(SHORT) == 0
    assert lifecycle._blocks[SHORT].last_access == 5
    assert lifecycle.tail(5) == MutableCacheTail(0, 20)
    refused(lifecycle, CacheLifecycleError.MissingBlock(E1), lambda: lifecycle.release(E1))


def test_l5_a_refused_truncation_changes_nothing() -> None:
    lifecycle = lifecycle_of(E0, E1, E2)
    lifecycle.acquire(E1)
    lifecycle.acquire(E2)
    refused(
        lifecycle,
        CacheLifecycleError.UnexpectedLeaseCount(E2, 0, 1),
        lambda: lifecycle.replace([(E1, 1), (E2, 0)], (SHORT, False), 5, MutableCacheTail(0, 20)),
    )
    assert lifecycle.lease_count(E1) == 1
    assert lifecycle.tail(5) is None
    assert lifecycle._access_clock == 5
    refused(lifecycle, CacheLifecycleError.MissingBlock(SHORT), lambda: lifecycle.is_leased(SHORT))


def test_l6_a_replacement_of_the_same_identity_is_a_new_record() -> None:
    lifecycle = lifecycle_of(E1)
    lifecycle.acquire(E1)
    lifecycle.replace([(E1, 1)], (E1, True), 5, MutableCacheTail(0, 32))
    assert lifecycle.lease_count(E1) == 0
    assert lifecycle.is_protected_prefix(E1)
    refused(lifecycle, CacheLifecycleError.LeaseUnderflow(E1), lambda: lifecycle.release(E1))


def test_l7_the_clock_at_its_end() -> None:
    lifecycle = lifecycle_of(A, B)
    lifecycle.acquire(B)
    lifecycle._access_clock = U64_MAX
    full = CacheLifecycleError.AccessClockOverflow()
    refused(lifecycle, full, lambda: lifecycle.insert(C, False))
    refused(lifecycle, full, lambda: lifecycle.acquire(A))
    refused(lifecycle, full, lambda: lifecycle.replace([(A, 0)], (C, False), 5, TAIL))
    lifecycle.replace([(A, 0)], None, 5, MutableCacheTail())
    lifecycle.release(B)
    assert state(lifecycle)[0] == U64_MAX
    refused(lifecycle, CacheLifecycleError.MissingBlock(A), lambda: lifecycle.lease_count(A))


def test_l7_the_last_tick_is_usable() -> None:
    lifecycle = lifecycle_of(A)
    lifecycle._access_clock = U64_MAX - 1
    lifecycle.acquire(A)
    assert lifecycle._blocks[A].last_access == lifecycle._access_clock == U64_MAX


def test_l7_order_of_refusals() -> None:
    lifecycle = lifecycle_of(A)
    lifecycle._access_clock = U64_MAX
    refused(lifecycle, CacheLifecycleError.MissingBlock(B), lambda: lifecycle.acquire(B))
    refused(lifecycle, CacheLifecycleError.DuplicateBlock(A), lambda: lifecycle.insert(A, True))
    lifecycle._blocks[A].leases = USIZE_MAX
    refused(lifecycle, CacheLifecycleError.LeaseOverflow(A), lambda: lifecycle.acquire(A))


def test_l8_every_refusal_leaves_the_clock() -> None:
    lifecycle = lifecycle_of(A, B)
    lifecycle.acquire(B)
    refuse = CacheLifecycleError
    refused(lifecycle, refuse.DuplicateBlock(A), lambda: lifecycle.insert(A, False))
    refused(lifecycle, refuse.MissingBlock(C), lambda: lifecycle.remove(C))
    refused(lifecycle, refuse.BlockLeased(B), lambda: lifecycle.remove(B))
    refused(lifecycle, refuse.BlockLeased(B), lifecycle.clear)
    refused(lifecycle, refuse.LeaseUnderflow(A), lambda: lifecycle.release(A))
    again, held = [(A, 0), (A, 0)], [(A, 0), (B, 0)]
    refused(lifecycle, refuse.DuplicateRemoval(), lambda: lifecycle.replace(again, None, 1, TAIL))
    wrong = refuse.UnexpectedLeaseCount(B, 0, 1)
    refused(lifecycle, wrong, lambda: lifecycle.replace(held, (C, False), 1, TAIL))
    lifecycle._blocks[A].leases = USIZE_MAX
    refused(lifecycle, refuse.LeaseOverflow(A), lambda: lifecycle.acquire(A))
    lifecycle._access_clock = U64_MAX
    refused(lifecycle, refuse.AccessClockOverflow(), lambda: lifecycle.acquire(B))


@pytest.mark.parametrize("known", [True, False])
def test_l9_a_block_removed_twice(known: bool) -> None:
    lifecycle = lifecycle_of(*([A] if known else []))
    twice = [(A, 0), (A, 1)]
    duplicate = CacheLifecycleError.DuplicateRemoval()
    refused(lifecycle, duplicate, lambda: lifecycle.replace(twice, None, 1, TAIL))


def test_l10_the_first_wrong_removal_in_list_order_is_reported() -> None:
    lifecycle = lifecycle_of(A)
    missing = CacheLifecycleError.MissingBlock(B)
    wrong = CacheLifecycleError.UnexpectedLeaseCount(A, 3, 0)
    refused(lifecycle, missing, lambda: lifecycle.replace([(B, 0), (A, 3)], None, 1, TAIL))
    refused(lifecycle, wrong, lambda: lifecycle.replace([(A, 3), (B, 0)], None, 1, TAIL))


def test_l11_a_replacement_that_exists() -> None:
    lifecycle = lifecycle_of(A, B)
    duplicate = CacheLifecycleError.DuplicateBlock(B)
    refused(lifecycle, duplicate, lambda: lifecycle.replace([(A, 0)], (B, True), 3, TAIL))
    lifecycle.replace([(A, 0), (B, 0)], (B, True), 3, TAIL)
    assert set(lifecycle._blocks) == {B}
    assert lifecycle._blocks[B].last_access == lifecycle._access_clock == 3


def test_l12_an_empty_replace_sets_the_tail() -> None:
    lifecycle = lifecycle_of(A)
    assert lifecycle.replace([], None, 7, TAIL) is None  # type: ignore[func-returns-value]
    assert lifecycle.tail(7) == TAIL
    assert lifecycle._access_clock == 1


def test_l12_removals_may_span_layers() -> None:
    lifecycle = lifecycle_of(A, E0, block(0, 0, 4, session=1))
    lifecycle.replace([(A, 0), (E0, 0)], None, 6, TAIL)
    assert list(lifecycle._blocks) == [block(0, 0, 4, session=1)]


def test_l13_releasing_is_no_access() -> None:
    lifecycle = lifecycle_of(A, B)
    lifecycle.acquire(A)
    lifecycle.acquire(B)
    lifecycle.release(B)
    lifecycle.release(A)
    assert lifecycle.eviction_candidate([A, B], None, 0, LRU) == A


def test_l14_which_unknown_block_is_reported() -> None:
    low, high = block(0, 1, 2), block(0, 5, 6)
    lifecycle = lifecycle_of(A)
    refused(
        lifecycle,
        CacheLifecycleError.MissingBlock(low),
        lambda: lifecycle.eviction_candidate([high, A, low], None, 0, LRU),
    )
    refused(
        lifecycle,
        CacheLifecycleError.MissingBlock(low),  # also when `required` would have filtered it
        lambda: lifecycle.eviction_candidate([low], low, 9, LRU),
    )
    refused(
        lifecycle,
        CacheLifecycleError.MissingBlock(high),
        lambda: lifecycle.recent_protection_counts([high, low], 0),
    )
    assert lifecycle.recent_protection_counts([A], 0) == {}


def test_l15_tails_roll_back() -> None:
    lifecycle = CacheBlockLifecycle()
    assert lifecycle.set_tail(7, TAIL) is None
    assert lifecycle.set_tail(7, MutableCacheTail(32, 4)) == TAIL
    lifecycle.restore_tail(7, TAIL)
    assert lifecycle.tail(7) == TAIL
    lifecycle.restore_tail(7, None)
    lifecycle.restore_tail(7, None)
    assert lifecycle.tail(7) is None
    assert lifecycle.tails() == []
    assert lifecycle._access_clock == 0


def test_l15_tails_are_a_snapshot_in_layer_order() -> None:
    lifecycle = CacheBlockLifecycle()
    for layer in (USIZE_MAX, 3, 0):
        lifecycle.set_tail(layer, MutableCacheTail(layer, -layer >> 1))
    tails = lifecycle.tails()
    for layer, tail in tails:
        lifecycle.restore_tail(layer, None)
        assert tail.bytes == layer
    assert [layer for layer, _ in tails] == [0, 3, USIZE_MAX]


def test_l15_clear_is_all_or_nothing() -> None:
    low, high = block(1, 0, 4), block(4, 0, 4)
    lifecycle = lifecycle_of(high, low, A)
    lifecycle.set_tail(1, TAIL)
    lifecycle.acquire(high)
    lifecycle.acquire(low)
    assert lifecycle.first_leased() == low
    refused(lifecycle, CacheLifecycleError.BlockLeased(low), lifecycle.clear)
    lifecycle.release(low)
    refused(lifecycle, CacheLifecycleError.BlockLeased(high), lifecycle.clear)
    lifecycle.release(high)
    assert lifecycle.first_leased() is None
    lifecycle._access_clock = 12
    lifecycle.clear()
    assert state(lifecycle) == (12, {}, {})
    lifecycle.insert(A, False)
    assert lifecycle._blocks[A].last_access == 13


def test_l16_the_access_count_saturates() -> None:
    lifecycle = lifecycle_of(A)
    lifecycle._blocks[A].access_count = U64_MAX - 1
    for leases in (1, 2):
        lifecycle.acquire(A)
        assert lifecycle._blocks[A].access_count == U64_MAX
        assert lifecycle.lease_count(A) == leases


def test_l17_identity_order() -> None:
    ascending = [
        block(1, 0, 4),
        block(1, 0, 4, rank=rank(None, None, None)),
        block(1, 0, 4, rank=rank(0, None, None)),
        block(1, 0, 4, rank=rank(0, 7, None)),
        block(1, 0, 5),
        block(1, 1, 2),
        block(1, -9, 0, representation=LATENT),
        block(2, 0, 4, representation=KEY_VALUE),
        block(0, 0, 4, session=10),
    ]
    lifecycle = lifecycle_of(*reversed(ascending))
    for id in ascending:
        lifecycle.acquire(id)
    leased = []
    while (id_ := lifecycle.first_leased()) is not None:
        leased.append(id_)
        lifecycle.release(id_)
    assert leased == ascending


def test_blocks_at_one_place_of_a_layer_are_recent_by_identity() -> None:
    low, high = block(1, 0, 4), block(1, 0, 4, rank=rank(0, None, None))
    lifecycle = lifecycle_of(low, high)
    for candidates in ([low, high], [high, low]):
        assert lifecycle.eviction_candidate(candidates, None, 1, LRU) == low
