"""A snapshot adds up, equals the calls it replaces, and never shows the dead as alive."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

import shmcache as sc
from shmcache.errors import CachePoolError, SegmentError
from shmcache.pool.supervisor import recreate
from tests.pool.raw import Segment
from tests.support import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = sc.CachePoolLimits(1 << 20, 4 << 20, 1 << 20, 1 << 20)
HOLD = (
    "pool = sc.CacheResidencyPool.attach(name)\n"
    "member = pool.register_manager(70)\n"
    "pool.update_manager(70, sc.CachePoolUsage(host_bytes=7, disk_bytes=3))\n"
    "token = pool.reserve(sc.CachePoolUsage(device_bytes=5))\n"
    "lease = pool.allocate(100).publish(bytes(32)).lease\n"
    "private = pool.allocate(5000)\n"
    "found = [pool.lookup(bytes(32)), pool.lookup(bytes([1]) * 32)]"
)


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=4 << 20) as made:
        yield made


def holder(name: str) -> Worker:
    worker = Worker("import shmcache as sc")
    worker.call(HOLD, name=name)
    return worker


def agrees(taken: sc.PoolSnapshot, pool: sc.CacheResidencyPool) -> None:
    """With each call that tells a part of it."""
    report, owners = pool.report(), pool.owners()
    for axis, level in taken.axes.items():
        assert level.current_bytes == getattr(report, f"current_{axis}_bytes")
        assert level.peak_bytes == getattr(report, f"peak_{axis}_bytes")
        assert level.limit_bytes == getattr(report.limits, f"{axis}_bytes")
    assert taken.pool_id == f"{report.pool_id:016x}"
    assert len(taken.managers) == report.managers
    shared = ("slot", "pid", "verdict", "cleaning", "managers", "reservations", "usage")
    assert [[getattr(row, key) for key in shared] for row in taken.owners] == [
        [getattr(row, key) for key in shared] for row in owners
    ]
    if taken.arena is None:
        return
    arena = pool.arena_report()
    same = set(arena.__struct_fields__) - {"draining"}
    assert {key: getattr(taken.arena, key) for key in same} == {
        key: getattr(arena, key) for key in same
    }
    holdings = {row.slot: row for row in pool.holdings()}
    for row in taken.owners:
        held = holdings.get(row.slot, sc.ArenaHolding(row.slot, row.pid, 0, 0, 0, 0))
        for key in ("leased_blocks", "leased_bytes", "private_blocks", "private_bytes"):
            assert getattr(row, key) == getattr(held, key)


def test_it_equals_the_calls_that_tell_its_parts(pool: sc.CacheResidencyPool) -> None:
    with holder(pool.name) as worker:
        with sc.CacheResidencyPool.observe(pool.name) as observer:
            taken = observer.snapshot()
            agrees(taken, observer)
        row = next(row for row in taken.owners if row.pid == worker.pid)
        assert (row.usage.host_bytes, row.leased_blocks, row.private_blocks) == (7, 1, 1)
        assert (row.hits, row.misses) == (1, 1)
        assert row.command is not None
        (manager,) = taken.managers
        assert (int(manager.manager, 16), manager.slot) == (70, row.slot)
        assert manager.usage == sc.CachePoolUsage(host_bytes=7, disk_bytes=3)
        assert taken.arena is not None
        assert sorted(filter(None, taken.arena.slab_block_bytes)) == [128, 8192]
        assert sum(taken.arena.slab_used_blocks) == taken.arena.used_blocks == 2


def test_a_pool_without_an_arena(pool_name: str) -> None:
    with sc.CacheResidencyPool(LIMITS) as pool:
        taken = pool.snapshot()
        assert (taken.arena, taken.named) == (None, False)
        agrees(taken, pool)


def test_json_and_back(pool: sc.CacheResidencyPool) -> None:
    taken = pool.snapshot()
    assert msgspec.json.decode(msgspec.json.encode(taken), type=sc.PoolSnapshot) == taken


def test_the_dead_are_shown_as_dead_and_without_a_command(pool: sc.CacheResidencyPool) -> None:
    with holder(pool.name) as worker:
        worker.kill()
        row = next(row for row in pool.snapshot().owners if row.pid == worker.pid)
        assert (row.standing, row.command, row.usage.device_bytes) == ("dead", None, 5)
    pool.sweep()
    assert [row.standing for row in pool.snapshot().owners] == ["alive"]


def test_an_owner_counts_from_its_own_beginning(pool: sc.CacheResidencyPool) -> None:
    """Counters survive the reuse of a slot; what the one before had hit is not the next one's."""
    for _ in range(2):
        with holder(pool.name) as worker:
            row = next(row for row in pool.snapshot().owners if row.pid == worker.pid)
            assert (row.slot, row.hits, row.misses) == (1, 1, 1)
            worker.kill()
        pool.sweep()
    arena = pool.snapshot().arena
    assert arena is not None
    assert (arena.hits, arena.misses) == (2, 2)


def test_it_adds_up_while_others_change(pool: sc.CacheResidencyPool) -> None:
    """Device and disk are charged by owners alone: their rows' sum is the total, at any instant."""
    stop = threading.Event()
    worker = sc.CacheResidencyPool.attach(pool.name)

    def change() -> None:
        with worker.register_manager(None) as member:
            while not stop.is_set():
                worker.update_manager(member.manager, sc.CachePoolUsage(5, 0, 0, 9))
                with worker.reserve(sc.CachePoolUsage(device_bytes=11)):
                    worker.update_manager(member.manager, sc.CachePoolUsage(3, 0, 0, 2))

    thread = threading.Thread(target=change)
    thread.start()
    levels = set()
    try:
        for _ in range(500):
            taken = pool.snapshot()
            for axis in ("device", "disk"):
                total = getattr(taken.axes, axis).current_bytes
                key = f"{axis}_bytes"
                assert total == sum(getattr(row.usage, key) for row in taken.owners)
            published = sum(row.usage.disk_bytes for row in taken.managers)
            assert published == taken.axes.disk.current_bytes
            levels.add(taken.axes.device.current_bytes)
    finally:
        stop.set()
        thread.join()
        worker.close()
    assert len(levels) > 1, "nothing changed meanwhile"


def test_an_ended_pool_has_none(pool: sc.CacheResidencyPool) -> None:
    with sc.CacheResidencyPool.observe(pool.name) as observer:
        sc.CacheResidencyPool.destroy(pool.name, force=True)
        with pytest.raises(SegmentError.Retired):
            observer.snapshot()


# ---- watching a name -----------------------------------------------------------------------------


def test_a_watcher_follows_the_name(pool: sc.CacheResidencyPool) -> None:
    with sc.PoolWatcher(pool.name) as watcher:
        first = watcher.look()
        successor = recreate(pool)
        assert successor is not None
        second = watcher.look()
        assert (second.pool_id, second.owners) == (f"{successor.id:016x}", ())
        assert second.pool_id != first.pool_id
        sc.CacheResidencyPool.destroy(pool.name)
        with pytest.raises(SegmentError.NotFound):
            watcher.look()
        successor.close()
        with sc.CacheResidencyPool.create(pool.name, LIMITS, arena_bytes=0) as third:
            assert watcher.look().pool_id == f"{third.id:016x}"


def test_a_watcher_does_not_show_a_pool_whose_name_was_taken_away(
    pool: sc.CacheResidencyPool,
) -> None:
    with sc.PoolWatcher(pool.name) as watcher:
        watcher.look()
        sc.segment_path(pool.name).unlink()
        with pytest.raises(SegmentError.NotFound):
            watcher.look()


def test_a_watcher_says_that_a_pool_is_poisoned(pool: sc.CacheResidencyPool) -> None:
    with sc.PoolWatcher(pool.name) as watcher, Segment(sc.segment_path(pool.name)) as raw:
        watcher.look()
        raw.damage_total()
        assert not pool.verify().ok
        with pytest.raises(CachePoolError.Poisoned):
            watcher.look()


def test_a_watcher_can_reclaim(pool: sc.CacheResidencyPool) -> None:
    with sc.PoolWatcher(pool.name) as watcher, holder(pool.name) as worker:
        worker.kill()
        assert [owner.pid for owner in watcher.sweep()] == [worker.pid]
        assert len(watcher.look().owners) == 1
