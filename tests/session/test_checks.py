"""Checks R5 to R19 of contract/residency.md; R1 to R3 are in test_options.py, R4 in
test_worked_life.py.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from shmcache.errors import CacheLifecycleError, CachePoolError, CacheResidencyError
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.policy.layer import LayerCachePolicy
from shmcache.pool.values import CachePoolResource
from shmcache.session.backend import BlockSpec
from shmcache.session.block_files import write_block
from shmcache.session.reading import CacheBlockLease
from shmcache.session.session import CacheSession
from shmcache.states.storage import CacheStoragePhase
from tests.session.rig import (
    FULL,
    Copies,
    Files,
    axes,
    content,
    elsewhere,
    grow,
    left_in,
    make,
    model,
    peaks,
    published,
    shared_pool,
    tiny,
    tokens,
    wait_for,
)
from tests.support import wait_until

pytestmark = pytest.mark.usefixtures("engine")

Phase = CacheStoragePhase
Budget = CacheResidencyError.BudgetExceeded


def test_r5_a_tail_that_only_the_pool_has_no_room_for() -> None:
    ten_bytes = model(LayerCachePolicy.key_only(FULL, 1, 5))
    with (
        shared_pool(device=50) as pool,
        make(device=50, pool=pool, what=ten_bytes) as first,
        make(device=50, pool=pool, what=ten_bytes) as second,
    ):
        first.append(0, tokens(0, 3, width=5))
        with pytest.raises(CacheResidencyError.Pool) as caught:
            second.append(0, tokens(0, 3, width=5))
        refused = CachePoolError.BudgetExceeded(CachePoolResource.DEVICE, 60, 50)
        assert caught.value.error == refused
        assert second.position(0) == 0
        assert second.tail(0) is None
        report = pool.report()
        assert (axes(report)[0], peaks(report)[0], report.managers) == (30, 30, 2)
        second.append(0, tokens(0, 2, width=5))
        assert axes(pool.report())[0] == 50


def test_r6_a_backed_block_leaves_the_device_without_any_host_budget(tmp_path: Path) -> None:
    with make(device=64, host=40, disk=(tmp_path, 64)) as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        session.demote(first)
        session.lease(first).release()
        assert session.phase(first) is Phase.DEVICE
        object.__setattr__(session._core.options, "host_budget_bytes", 0)
        grow(session, 4)
        grow(session, 1)
        assert session.phase(first) is Phase.DISK_READY
        assert published(session) == (40, 0, 0, 32)
        with pytest.raises(Budget) as caught:
            grow(session, 8)
        assert caught.value == Budget(CacheTier.HOST, 40, 0)
        assert content_positions(session.blocks()) == [(0, 4), (4, 8)]
        assert session.position(0) == 9


def content_positions(ids: list[CacheBlockId]) -> list[tuple[int, int]]:
    return [(id.start, id.end) for id in ids]


def test_r6_an_unbacked_block_needs_host_budget() -> None:
    with make(device=64, host=0) as session:
        grow(session, 8)
        with pytest.raises(Budget) as caught:
            grow(session, 1)
        assert caught.value == Budget(CacheTier.HOST, 40, 0)
        assert session.report().failures == 1
        assert published(session) == (64, 0, 0, 0)


def test_r7_clear_returns_when_the_write_is_gone(tmp_path: Path, files: Files) -> None:
    files.shut()
    with make(disk=(tmp_path, 64)) as session:
        pool = session.pool
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        with elsewhere(lambda: session.demote(first)) as writer:
            assert files.writing.wait(60)
            with elsewhere(lambda: session.lease(first)) as reader:
                wait_until(lambda: session.report().in_flight_write_blocks == 1, "the write")
                with elsewhere(session.clear) as cleared:
                    wait_until(lambda: len(writer) == 1, "the waiter is cancelled at once")
                    wait_until(lambda: len(reader) == 1, "the reader is cancelled at once")
                    assert axes(pool.report()) == (0, 40, 40, 32)
                    assert cleared == []
                    files.open()
        cancelled = CacheResidencyError.DiskOperationCancelled(0)
        assert writer == [cancelled]
        assert reader == [cancelled]
        assert cleared == [None]
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert session.report().cancellations == 1
        assert left_in(tmp_path) == []


def test_r8_clear_returns_when_the_demotion_is_gone(copies: Copies) -> None:
    copies.shut()
    with make(copies=copies) as session:
        grow(session, 4)
        first = session.blocks()[0]
        with elsewhere(lambda: session.demote(first)) as demoted:
            wait_until(lambda: copies.started == 1, "the copy runs")
            with elsewhere(session.clear) as cleared:
                wait_until(lambda: session.generation == 1, "the new generation")
                assert axes(session.pool.report()) == (32, 40, 40, 0)
                assert session.report().in_flight_host_demotion_blocks == 1
                assert cleared == []
                copies.open()
        assert demoted == [None]
        assert cleared == [None]
        assert axes(session.pool.report()) == (0, 0, 0, 0)


def test_r9_a_failed_demotion_leaves_the_block_on_the_device(copies: Copies) -> None:
    copies.fails = lambda to, id: True
    with make(device=64, copies=copies) as session:
        grow(session, 8)
        with pytest.raises(CacheResidencyError.Runtime, match="the copy engine failed"):
            grow(session, 1)
        assert {session.phase(id) for id in session.blocks()} == {Phase.DEVICE}
        assert published(session) == axes(session.pool.report()) == (64, 0, 0, 0)
        assert session.report().failures == 1
        copies.fails = lambda to, id: False
        grow(session, 1)
        assert content(session) == list(range(9))


def test_r10_a_failed_background_write_is_told_once(tmp_path: Path, files: Files) -> None:
    files.fail("write")
    with make(device=64, host=40, disk=(tmp_path, 320)) as session:
        grow(session, 9)  # one block to the host, which is full then: it is written ahead
        wait_until(lambda: session.report().failures == 1, "the write failed")
        session.flush()
        files.fail()
        with pytest.raises(CacheResidencyError.Runtime, match="injected"):
            session.rebalance()
        session.rebalance()
        session.flush()
        assert content(session) == list(range(9))
        assert session.report().failures == 1


def test_r11_a_block_that_is_being_written_is_read_back(tmp_path: Path, files: Files) -> None:
    files.shut()
    with make(device=96, host=40, disk=(tmp_path, 320)) as session:
        grow(session, 8)
        first = session.blocks()[0]
        session.demote(first)
        session.rebalance()
        assert session.phase(first) is Phase.HOST_WRITING
        with elsewhere(lambda: session.lease(first)) as leased:
            assert files.writing.wait(60)
            assert axes(session.pool.report())[1] == 40
            assert leased == []
            files.open()
        (lease,) = leased
        assert isinstance(lease, CacheBlockLease)
        assert lease.arrays[0][0, 0, :, 0].tolist() == [0, 1, 2, 3]
        lease.release()
        assert peaks(session.pool.report())[1] == 40
        assert session.report().disk_promotions == 1


def test_r12_truncation_of_a_block_that_others_read_changes_nothing() -> None:
    with make() as session:
        grow(session, 14)
        blocks = session.blocks()
        with session.lease(blocks[1]) as lease:
            before = published(session), session.generation, session.blocks()
            with pytest.raises(CacheResidencyError.Lifecycle) as caught:
                session.truncate(0, 6)
            expected = CacheLifecycleError.UnexpectedLeaseCount(blocks[1], 1, 2)
            assert caught.value.error == expected
            assert (published(session), session.generation, session.blocks()) == before
            assert session.position(0) == 14
            assert session.tail(0) is not None
            assert lease.arrays[0].shape == (1, 1, 4, 2)
        session.truncate(0, 6)
        assert content(session) == list(range(6))
        assert session.generation == 1


def test_r13_sliding_discard_keeps_prefix_leased_and_imported_blocks(tmp_path: Path) -> None:
    what = tiny(window=4, sink_tokens=4)
    with make(what=what, disk=(tmp_path, 320)) as session:
        spec = _spec_of_a_block(session)
        arrays = tokens(4, 4), -tokens(4, 4)
        id = CacheBlockId(
            session_id=session.id,
            global_layer=0,
            representation=session.blocks()[0].representation,
            start=4,
            end=8,
        )
        file = write_block(tmp_path, id, spec, arrays)._replace(persistent=True)
        session.import_block(0, 4, 8, spec, file)
        grow(session, 16)
        assert content_positions(session.blocks()) == [(n, n + 4) for n in range(0, 24, 4)]
        with session.lease(session.blocks()[2]):
            assert session.discard_sliding(0) == 2
        assert content_positions(session.blocks()) == [(0, 4), (4, 8), (8, 12), (20, 24)]
        assert session.generation == 1
        assert session.report().discarded_sliding_blocks == 2
        assert session.discard_sliding(0) == 1
        assert session.discard_sliding(0) == 0
        assert session.generation == 2
        assert file.path.exists()
        session.clear()
        assert file.path.exists()  # it is a prompt cache's
        file.path.unlink()


def _spec_of_a_block(session: CacheSession) -> BlockSpec:
    grow(session, 4)
    return next(iter(session._core.records.values())).spec


def test_r14_a_device_with_room_for_one_block_visits_all(tmp_path: Path) -> None:
    with make() as source:
        spec = _spec_of_a_block(source)
        id = source.blocks()[0]
    with make(device=32, host=40) as session:
        for start in range(0, 16, 4):
            arrays = tokens(start, 4), -tokens(start, 4)
            file = write_block(tmp_path, id, spec, arrays)._replace(persistent=True)
            session.import_block(0, start, start + 4, spec, file)
        assert content(session) == list(range(16))
        assert session.report().failures == 0
        assert session.report().disk_promotions == 4
        assert peaks(session.pool.report())[:2] == (32, 40)


def test_r14_with_room_for_two_the_next_one_is_brought_ahead() -> None:
    with make(device=64) as session:
        grow(session, 16)
        blocks = session.blocks()
        for position, lease in enumerate(session.window(blocks)):
            assert lease.id == blocks[position]
            following = blocks[position + 1 : position + 2]
            assert [session.phase(id) for id in following] == [Phase.DEVICE] * len(following)
        assert session.report().failures == 0


def test_r15_after_the_end_nothing_is_held(tmp_path: Path) -> None:
    with shared_pool() as pool:
        session = make(device=64, host=80, disk=(tmp_path, 640), pool=pool)
        grow(session, 30)
        lease = session.lease(session.blocks()[0])
        lease.release()
        assert left_in(tmp_path) != []
        thread = f"shmcache-disk-{session.id}"
        assert thread in {each.name for each in threading.enumerate()}
        session.close()
        assert thread not in {each.name for each in threading.enumerate()}
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert pool.report().managers == 0
        assert left_in(tmp_path) == []


def test_r16_the_last_handle_ends_the_session() -> None:
    with shared_pool() as pool:
        first = make(pool=pool)
        second = first.share()
        grow(first, 4)
        first.close()
        first.close()
        assert axes(pool.report()) == (32, 0, 0, 0)
        with pytest.raises(ValueError, match="closed"):
            first.position(0)
        assert content(second) == [0, 1, 2, 3]
        second.close()
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert pool.report().managers == 0


def test_r17_the_host_is_charged_what_buffers_occupy() -> None:
    what = model(LayerCachePolicy.key_value(FULL, 5, 50))
    with make(what=what, block=20, granule=8192) as session:
        keys = np.zeros((1, 5, 20, 50), np.float32)
        session.append(0, keys, keys)
        assert published(session) == (40000, 0, 0, 0)
        session.demote(session.blocks()[0])
        assert published(session) == axes(session.pool.report()) == (0, 49152, 0, 0)


def test_r18_clear_leaves_what_was_counted(tmp_path: Path) -> None:
    with make(device=64, host=80, disk=(tmp_path, 640)) as session:
        grow(session, 30)
        content(session)
        session.flush()
        before = session.report()
        session.clear()
        after = session.report()
        told = set(before.__struct_fields__) - _GAUGES - {"per_layer"}
        for name in told:
            assert getattr(before, name) == getattr(after, name), name
        assert {getattr(after, name) for name in _GAUGES} == {0}
        assert [row.global_layer for row in after.per_layer] == [0]
        activity, kept = before.per_layer[0].stats, after.per_layer[0].stats
        for name in activity.__struct_fields__:
            expected = 0 if name in _GAUGES else getattr(activity, name)
            assert getattr(kept, name) == expected, name


_GAUGES = {
    "logical_cached_tokens",
    "key_value_blocks",
    "compressed_latent_blocks",
    "device_blocks",
    "host_blocks",
    "disk_blocks",
    "current_device_bytes",
    "current_host_bytes",
    "current_disk_bytes",
    "mutable_tail_bytes",
    "in_flight_write_blocks",
    "in_flight_write_bytes",
    "in_flight_host_demotion_blocks",
    "in_flight_host_demotion_bytes",
    "protected_recent_blocks",
    "protected_prefix_blocks",
}


def test_r19_a_refused_tail_is_undone() -> None:
    with make(device=40, host=0) as session:
        grow(session, 4)
        with pytest.raises(Budget) as caught:
            grow(session, 2)
        assert caught.value.tier is CacheTier.DEVICE or caught.value.tier is CacheTier.HOST
        report = session.report()
        assert report.tail_allocations == 1
        assert report.mutable_tail_bytes == 0
        assert session.tail(0) is None
        assert session.position(0) == 4
        assert published(session) == axes(session.pool.report()) == (32, 0, 0, 0)
        grow(session, 1)
        with pytest.raises(Budget):
            grow(session, 1)
        assert session.report().tail_allocations == 2
        assert session.position(0) == 5
        wait_for(session.pool, (40, 0, 0, 0))
