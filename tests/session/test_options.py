"""Checks R1 to R3 of contract/residency.md, and what the options say of themselves."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from shmcache.errors import CachePoolError, CacheResidencyConfigurationError
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits
from shmcache.session.options import (
    CacheResidencyPolicy,
    LiveCacheDiskPolicy,
    PagedCacheOptions,
)
from shmcache.states.lifecycle import CacheEvictionPolicy

Invalid = CacheResidencyConfigurationError.InvalidOptions
U64_MAX = (1 << 64) - 1


def options(block: int = 32, device: int = 100, host: int = 0, recent: int = 2) -> Any:
    return PagedCacheOptions(block, device, host, recent)


def limits_of(made: PagedCacheOptions) -> tuple[int, ...]:
    pool = made.create_pool()
    axes = pool.limits
    pool.close()
    return (
        axes.device_bytes,
        axes.host_bytes,
        axes.transfer_in_flight_bytes,
        axes.disk_bytes,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((0, 0, 0, 0), "block_size_not_positive"),
        ((-1, 1, 1, 1), "block_size_not_positive"),
        ((1, 0, 0, 0), "device_budget_zero"),
        ((1, 1, 0, 0), "recent_blocks_zero"),
    ],
)
def test_r1_the_first_wrong_limit_is_named(arguments: tuple[int, ...], code: str) -> None:
    with pytest.raises(Invalid) as caught:
        PagedCacheOptions(*arguments)
    assert caught.value == Invalid(code)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    ("wrong", "error"), [(True, TypeError), (1.0, TypeError), (-(1 << 70), ValueError)]
)
def test_a_value_outside_its_domain_is_no_option(
    place: int, wrong: Any, error: type[Exception]
) -> None:
    arguments: list[Any] = [1, 1, 1, 1]
    arguments[place] = wrong
    with pytest.raises(error):
        PagedCacheOptions(*arguments)


def test_r1_create_pool_sizes_it_for_this_session() -> None:
    assert limits_of(options()) == (100, 0, 200, 0)
    assert limits_of(options().with_live_disk("d", 60, 3)) == (100, 0, 200, 60)
    assert limits_of(PagedCacheOptions(32, 1 << 63, 5, 1)) == (1 << 63, 5, U64_MAX, 0)
    assert limits_of(options(host=300)) == (100, 300, 600, 0)


def test_create_pool_makes_another_pool_each_time_and_attaches_none() -> None:
    made = options()
    with made.create_pool() as first, made.create_pool() as second:
        assert first != second
        assert made.pool is None
        attached = made.with_pool(first)
        with attached.create_pool() as third:
            assert third not in (first, second)
            assert attached.pool is first


@pytest.mark.parametrize(
    ("made", "code", "numbers"),
    [
        (options(32, 100, 40, 1), "device_budget_exceeds_pool", ("100", "90")),
        (options(32, 90, 41, 1), "host_budget_exceeds_pool", ("41", "40")),
        (
            options(32, 90, 40, 1).with_live_disk("d", 51, 1),
            "disk_budget_exceeds_pool",
            ("51", "50"),
        ),
        (options(32, 90, 40, 1), None, ()),
        (options(32, 90, 40, 1).with_live_disk("d", 50, 1), None, ()),
    ],
)
def test_r1_budgets_fit_the_pool(
    made: PagedCacheOptions, code: str | None, numbers: tuple[str, ...]
) -> None:
    with CacheResidencyPool(CachePoolLimits(90, 40, 9, 50)) as pool:
        if code is None:
            assert made.with_pool(pool).pool is pool
            return
        with pytest.raises(Invalid) as caught:
            made.with_pool(pool)
        assert caught.value.code == code
        assert all(number in str(caught.value) for number in numbers)


def test_r1_builders_leave_the_receiver_as_it_was() -> None:
    made = options()
    changed = (
        made.with_full_attention(True)
        .with_persistence_retention(True)
        .with_eviction_policy(CacheEvictionPolicy.LEAST_FREQUENTLY_USED)
        .with_process_sampling(True)
        .with_live_disk("d", 60, 3)
    )
    assert made == options()
    assert not made.full_attention_enabled
    assert changed.full_attention_enabled
    assert changed.retains_discarded_for_persistence
    assert changed.process_sampling_enabled
    assert changed.eviction_policy is CacheEvictionPolicy.LEAST_FREQUENTLY_USED
    assert changed.live_disk_policy == LiveCacheDiskPolicy.Enabled(Path("d"), 60, 3)
    assert changed.with_full_attention(False) != changed
    assert changed.with_live_disk("e", 61, 4).disk_budget_bytes == 61


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("", 0, 0), "disk_budget_zero"),
        (("", 1, 0), "queue_capacity_zero"),
        (("", 1, 1), "disk_directory_empty"),
        (("d", 0, 1), "disk_budget_zero"),
    ],
)
def test_r1_the_live_disk_is_checked(arguments: tuple[str, int, int], code: str) -> None:
    with pytest.raises(Invalid) as caught:
        options().with_live_disk(*arguments)
    assert caught.value.code == code


def test_r2_equality_looks_at_the_identity_of_pools() -> None:
    made, limits = options(), CachePoolLimits(100, 0, 200, 0)
    with CacheResidencyPool(limits) as one, CacheResidencyPool(limits) as two:
        assert made.with_pool(one) == made.with_pool(one)
        assert hash(made.with_pool(one)) == hash(made.with_pool(one))
        assert made.with_pool(one) != made.with_pool(two)
        assert made.with_pool(one) != made


def test_r3_the_order_of_calls_does_not_matter() -> None:
    with CacheResidencyPool(CachePoolLimits(90, 40, 9, 50)) as pool:
        made = options(32, 90, 40, 1)
        assert made.with_live_disk("d", 50, 1).with_pool(pool) == made.with_pool(
            pool
        ).with_live_disk("d", 50, 1)
        with pytest.raises(Invalid) as first:
            made.with_live_disk("d", 51, 1).with_pool(pool)
        with pytest.raises(Invalid) as second:
            made.with_pool(pool).with_live_disk("d", 51, 1)
        assert first.value == second.value == Invalid("disk_budget_exceeds_pool")


def test_policies_are_values_of_two_variants() -> None:
    made = options()
    assert CacheResidencyPolicy.default() == CacheResidencyPolicy.Device()
    assert CacheResidencyPolicy.Paged(made) == CacheResidencyPolicy.Paged(options())
    assert CacheResidencyPolicy.Paged(made) != object()
    assert LiveCacheDiskPolicy.default() == LiveCacheDiskPolicy.Disabled()
    assert isinstance(made.live_disk_policy, LiveCacheDiskPolicy.Disabled)
    for family in (CacheResidencyPolicy, LiveCacheDiskPolicy):
        with pytest.raises(TypeError, match="family"):
            family()
    with pytest.raises(AttributeError):
        made.host_budget_bytes = 5


@pytest.mark.parametrize(
    "live", [options(), CacheResidencyPolicy.Paged(options()), CacheResidencyPolicy.Device()]
)
def test_what_may_hold_a_pool_is_not_serialised(live: object) -> None:
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="pool"):
            attempt(live)


def test_errors_are_values() -> None:
    inner = CachePoolError.InvalidLimits("device_bytes_zero")
    wrapped = CacheResidencyConfigurationError.Pool(inner)
    assert wrapped.__cause__ is inner
    assert str(wrapped) == str(inner)
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped
    assert Invalid("device_budget_zero", "a") == Invalid("device_budget_zero", "b")
