"""Sizes of a pool: their bounds, and what happens when a table is full (G9)."""

import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CachePoolUsage,
    CacheResidencyPool,
    SegmentGeometry,
    bounds,
)
from shmcache import SegmentError as Segment
from shmcache.pool.names import segment_path
from shmcache.pool.segment import open_segment
from tests.pool.named import ATTACH, LIMITS, ONE, SMALL
from tests.support import Worker

BOUNDS = {
    "owners_max": (1, bounds.OWNERS_MAX_LIMIT),
    "managers_max": (1, bounds.MANAGERS_MAX_LIMIT),
    "reservations_max": (1, bounds.RESERVATIONS_MAX_LIMIT),
}


def make(name: str, **options: Any) -> CacheResidencyPool:
    return CacheResidencyPool.create(name, LIMITS, **(SMALL | options))


# ---- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", BOUNDS)
@pytest.mark.parametrize("end", [0, 1])
def test_each_size_works_at_its_bounds(pool_name: str, option: str, end: int) -> None:
    size = BOUNDS[option][end]
    with make(pool_name, **{option: size}) as pool:
        geometry = pool.geometry()
        assert getattr(geometry, option) == size
        member = pool.register_manager(None)
        pool.update_manager(member.manager, ONE)
        pool.reserve(ONE).release()
        assert pool.verify().ok
        member.release()
    with CacheResidencyPool.attach(pool_name) as again:
        assert again.geometry() == geometry


@pytest.mark.parametrize(
    "option", [*BOUNDS, "blocks_max", "block_bytes_max", "claims_max", "arena_bytes"]
)
@pytest.mark.parametrize(
    ("size", "error"),
    [("below", ValueError), ("above", ValueError), (True, TypeError), (1.0, TypeError)],
)
def test_sizes_outside_their_bounds_are_refused(
    pool_name: str, option: str, size: Any, error: type[Exception]
) -> None:
    limits = BOUNDS | {
        "blocks_max": (1, bounds.BLOCKS_MAX_LIMIT),
        "block_bytes_max": (1, 1 << 20),
        "claims_max": (0, bounds.CLAIMS_MAX_LIMIT),
        "arena_bytes": (0, bounds.ARENA_BYTES_LIMIT),
    }
    low, high = limits[option]
    sizes = {"below": low - 1, "above": high + 64}  # an arena is rounded down to 64 bytes
    options = {"arena_bytes": 1 << 20} | {option: sizes.get(size, size)}
    with pytest.raises(error, match=option):
        make(pool_name, **options)
    assert not segment_path(pool_name).exists()


def test_an_unknown_option_is_refused(pool_name: str) -> None:
    with pytest.raises(TypeError):
        make(pool_name, owner_max=3)
    assert not segment_path(pool_name).exists()


@pytest.mark.parametrize(
    ("host_bytes", "options", "arena_bytes", "blocks_max"),
    [
        (10, {}, 0, 0),
        ((64 << 10) - 1, {}, 0, 0),
        (64 << 10, {}, 64 << 10, 1),
        ((64 << 10) + 1, {}, 64 << 10, 1),
        ((64 << 10) + 64, {}, (64 << 10) + 64, 2),
        (1 << 20, {}, 1 << 20, 16),
        (1 << 20, {"arena_bytes": 0}, 0, 0),
        (1 << 20, {"arena_bytes": 2 << 20}, 2 << 20, 32),
        (1 << 20, {"blocks_max": 3}, 1 << 20, 3),
        (10, {"blocks_max": 3}, 0, 0),
    ],
)
def test_the_arena_is_as_large_as_the_host_limit_unless_told(
    pool_name: str, host_bytes: int, options: dict[str, int], arena_bytes: int, blocks_max: int
) -> None:
    limits = CachePoolLimits(10, host_bytes, 10, 10)
    with CacheResidencyPool.create(pool_name, limits, **SMALL, **options) as pool:
        found = pool.geometry()
        assert (found.arena_bytes, found.blocks_max) == (arena_bytes, blocks_max)
        assert found.segment_bytes == segment_path(pool_name).stat().st_size > arena_bytes


def test_an_arena_without_blocks_is_refused(pool_name: str) -> None:
    with pytest.raises(ValueError, match="blocks_max"):
        make(pool_name, arena_bytes=1 << 20, blocks_max=0)


def test_an_anonymous_pool_has_the_default_tables_and_no_arena() -> None:
    with CacheResidencyPool(CachePoolLimits(10, 1 << 30, 10, 10)) as pool:
        assert pool.geometry() == SegmentGeometry(limits=pool.limits)
        assert pool.geometry().owners_max == bounds.OWNERS_MAX_DEFAULT
        assert pool.name == ""


def test_limits_of_64_bits_are_kept(pool_name: str) -> None:
    limits = CachePoolLimits(*[bounds.U64_MAX] * 4)
    with CacheResidencyPool.create(pool_name, limits, arena_bytes=0, **SMALL) as pool:
        assert pool.limits == pool.geometry().limits == limits
        token = pool.reserve(CachePoolUsage(*[bounds.U64_MAX] * 4))
        assert pool.report().peak_disk_bytes == bounds.U64_MAX
        token.release()


# ---- full tables ---------------------------------------------------------------------------------


@pytest.fixture
def tiny(pool_name: str) -> Iterator[CacheResidencyPool]:
    with make(pool_name, owners_max=2, managers_max=3, reservations_max=3) as pool:
        yield pool


def fill(make_one: Callable[[], Any]) -> tuple[list[Any], Segment]:
    """All that can be made, and the error that ends it."""
    made: list[Any] = []
    try:
        while True:
            made.append(make_one())
    except Segment as error:
        return made, error


def test_a_full_table_of_managers_says_its_size(tiny: CacheResidencyPool) -> None:
    members, error = fill(lambda: tiny.register_manager(None))
    assert error == Segment.TableFull("managers", 3)
    assert len(members) == len({member.manager for member in members}) == 3
    with pytest.raises(CachePoolError.DuplicateManager):
        tiny.register_manager(members[0].manager)
    assert tiny.report().managers == 3
    members.pop().release()
    tiny.register_manager(77)
    assert tiny.verify().ok


def test_a_full_table_of_reservations_says_its_size(tiny: CacheResidencyPool) -> None:
    tokens, error = fill(lambda: tiny.reserve(CachePoolUsage()))
    assert error == Segment.TableFull("reservations", 3)
    assert len(tokens) == 3
    with pytest.raises(CachePoolError.BudgetExceeded):  # what does not fit is said first
        tiny.reserve(CachePoolUsage(host_bytes=11))
    tokens.pop().release()
    tiny.reserve(ONE).release()
    assert tiny.report().current_host_bytes == 0
    assert tiny.verify().ok


def test_a_full_table_of_owners_says_its_size(tiny: CacheResidencyPool) -> None:
    handles, error = fill(lambda: CacheResidencyPool.attach(tiny.name))
    assert error == Segment.OwnersFull(2)
    assert len(handles) == 1
    with CacheResidencyPool.observe(tiny.name) as observer:  # needs no slot
        assert len(observer.owners()) == 2
    handles.pop().close()
    CacheResidencyPool.attach(tiny.name).close()


def test_the_dead_make_room_in_every_table(tiny: CacheResidencyPool) -> None:
    """A full table is looked at again after a sweep, before anybody is refused."""
    with Worker(ATTACH) as worker:
        worker.call("attach(name)", name=tiny.name)
        worker.call("members = [pool.register_manager(None) for _ in range(3)]")
        worker.call("tokens = [pool.reserve(ONE) for _ in range(3)]")
        for refuse in (
            lambda: tiny.register_manager(None),
            lambda: tiny.reserve(ONE),
            lambda: CacheResidencyPool.attach(tiny.name),
        ):
            with pytest.raises((Segment.TableFull, Segment.OwnersFull)):
                refuse()
        worker.kill()
    first = tiny.register_manager(None)
    assert len(tiny.owners()) == 1
    with CacheResidencyPool.attach(tiny.name) as other:
        assert [other.reserve(ONE).usage for _ in range(4)] == [ONE] * 4
    first.release()


@pytest.mark.parametrize("table", ["managers", "reservations", "owners"])
def test_a_dead_owner_makes_room_for_each_kind_alone(tiny: CacheResidencyPool, table: str) -> None:
    with Worker(ATTACH) as worker:
        worker.call("attach(name)", name=tiny.name)
        worker.call("members = [pool.register_manager(None) for _ in range(3)]")
        worker.call("tokens = [pool.reserve(ONE) for _ in range(3)]")
        worker.kill()
    if table == "managers":
        tiny.register_manager(None).release()
    elif table == "reservations":
        tiny.reserve(ONE).release()
    else:
        CacheResidencyPool.attach(tiny.name).close()
    assert len(tiny.owners()) == 1


def test_a_thousand_owners_attach_and_leave(pool_name: str) -> None:
    """All in one worker, for the limit of descriptors is one process's own."""

    def attach_all(name: str, count: int) -> list[int]:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        joined = [
            CacheResidencyPool._from(open_segment(name), name)  # without the sweep of an attach
            for _ in range(count)
        ]
        globals()["handles"] = joined
        owners = joined[0].owners()
        return [len(owners), len({owner.nonce for owner in owners})]

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 3200:
        pytest.skip(f"needs 3200 descriptors, the hard limit is {hard}")
    begin = "import resource\nfrom shmcache.pool.segment import open_segment"
    with make(pool_name, owners_max=bounds.OWNERS_MAX_LIMIT) as pool:
        with Worker(ATTACH, begin, attach_all) as worker:
            assert worker.call("attach_all(name, 1023)", name=pool_name) == [1024, 1024]
            with pytest.raises(Segment.OwnersFull) as caught:
                CacheResidencyPool.attach(pool_name)
            assert caught.value == Segment.OwnersFull(1024)
            worker.call("tokens = [handle.reserve(CachePoolUsage()) for handle in handles[-3:]]")
            last = pool.owners()[-1]
            assert (last.slot, last.reservations) == (1023, 1)
            worker.call("handles[500].close()")
            CacheResidencyPool.attach(pool_name).close()
            worker.kill()
        assert len(pool.sweep()) == 1022
        assert len(pool.owners()) == 1
        assert pool.verify().ok


@pytest.mark.parametrize("wrong", [{"flags": -1}, {"flags": 1 << 32}, {"eviction_policy": 3}])
def test_words_that_no_creator_chose_are_refused(wrong: dict[str, int]) -> None:
    """A dump's header names a geometry, and anybody may have written it."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SegmentGeometry(limits=LIMITS, **wrong)
