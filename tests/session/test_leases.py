"""Leases: shared, dropped, refused, cancelled."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from shmcache.errors import CacheLifecycleError, CacheResidencyError
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.session.reading import CacheBlockLease
from shmcache.session.session import CacheSession
from shmcache.states.storage import CacheStoragePhase as Phase
from tests.session.rig import (
    Copies,
    Files,
    axes,
    content,
    elsewhere,
    grow,
    left_in,
    make,
    on_disk,
    published,
)
from tests.support import wait_until

pytestmark = pytest.mark.usefixtures("engine")

Budget = CacheResidencyError.BudgetExceeded
Runtime = CacheResidencyError.Runtime


def test_a_promotion_that_does_not_fit_is_taken_back() -> None:
    with make(device=96, host=120) as session:
        grow(session, 12)
        first, second, third = session.blocks()
        session.demote(first)
        grow(session, 3)
        with session.lease(second), session.lease(third):
            with pytest.raises(Budget) as caught:
                session.lease(first)
            assert caught.value == Budget(CacheTier.DEVICE, 120, 96)
            assert session.phase(first) is Phase.HOST_UNBACKED
            assert published(session) == axes(session.pool.report()) == (88, 40, 0, 0)
        report = session.report()
        assert (report.demand_misses, report.failures) == (1, 1)
        session.remove(first)  # it is not leased


def test_a_failed_copy_to_the_device_gives_everything_back() -> None:
    copies = Copies()
    with make(copies=copies) as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        copies.fails = lambda to, id: to is CacheTier.DEVICE
        with pytest.raises(Runtime, match="the copy engine failed"):
            session.lease(first)
        assert session.phase(first) is Phase.HOST_UNBACKED
        assert axes(session.pool.report()) == (0, 40, 0, 0)
        copies.fails = lambda to, id: False
        assert content(session) == [0, 1, 2, 3]


def test_two_readers_of_one_block_share_its_promotion() -> None:
    copies = Copies()
    with make(copies=copies) as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        copies.shut()
        with (
            elsewhere(lambda: session.lease(first)) as one,
            elsewhere(lambda: session.lease(first)) as two,
        ):
            wait_until(lambda: copies.started >= 3, "both copies have begun")
            copies.open()
        for lease in (*one, *two):
            assert isinstance(lease, CacheBlockLease)
            assert lease.arrays[0][0, 0, :, 0].tolist() == [0, 1, 2, 3]
            lease.release()
        assert axes(session.pool.report()) == (32, 0, 0, 0)
        assert session.report().demand_misses == 1


def test_clear_cancels_a_read_and_returns_when_its_buffers_are_gone(
    tmp_path: Path, files: Files
) -> None:
    with make(disk=(tmp_path, 320)) as session:
        (first,) = on_disk(session)
        files.shut()
        with elsewhere(lambda: session.lease(first)) as reader:
            assert files.reading.wait(60)
            with elsewhere(lambda: session.lease(first)) as joiner:
                wait_until(lambda: session.report().in_flight_waits > 2, "it joins")
                with elsewhere(session.clear) as cleared:
                    wait_until(lambda: reader and joiner, "both are cancelled at once")
                    wait_until(
                        lambda: axes(session.pool.report()) == (0, 40, 0, 0), "host is charged"
                    )
                    assert cleared == []
                    files.open()
        cancelled = CacheResidencyError.DiskOperationCancelled(0)
        assert reader == joiner == [cancelled]
        assert cleared == [None]
        assert axes(session.pool.report()) == (0, 0, 0, 0)
        assert left_in(tmp_path) == []
        grow(session, 4)  # the same identity, with other tokens in mind
        assert content(session) == [0, 1, 2, 3]


def test_a_lease_that_waits_for_an_old_generation_is_cancelled() -> None:
    copies = Copies()
    with make(copies=copies) as session:
        grow(session, 4)
        first = session.blocks()[0]
        copies.shut()
        with elsewhere(lambda: session.demote(first)):
            wait_until(lambda: copies.started == 1, "the copy runs")
            with elsewhere(lambda: session.lease(first)) as reader, elsewhere(session.clear):
                wait_until(lambda: session.generation == 1, "it is cleared")
                copies.open()
        assert reader == [CacheResidencyError.DiskOperationCancelled(0)]


def test_a_write_that_never_ran_gives_its_buffers_back(tmp_path: Path, files: Files) -> None:
    files.shut()
    with make(disk=(tmp_path, 640)) as session:
        grow(session, 12)
        blocks = session.blocks()
        for id in blocks:
            session.demote(id)
        with elsewhere(lambda: session.demote(blocks[0])):
            assert files.writing.wait(60)
            with elsewhere(lambda: session.demote(blocks[1])) as queued:
                wait_until(lambda: session.report().in_flight_write_blocks == 2, "one is queued")
                with elsewhere(lambda: session.remove(blocks[2])) as removed:
                    wait_until(lambda: queued, "it is cancelled")
                    files.open()
        assert removed == [None]
        assert queued == [CacheResidencyError.DiskOperationCancelled(0)]
        assert [session.phase(id) for id in blocks[:2]] == [Phase.HOST_UNBACKED] * 2
        assert axes(session.pool.report()) == (0, 80, 0, 0)
        assert left_in(tmp_path) == []
        assert content_of(session, blocks[:2]) == [0, 1, 2, 3, 4, 5, 6, 7]


def content_of(session: CacheSession, ids: list[CacheBlockId]) -> list[int]:
    return [int(n) for lease in session.window(ids) for n in lease.arrays[0][0, 0, :, 0]]


def test_readers_of_one_file_share_its_read(tmp_path: Path, files: Files) -> None:
    with make(disk=(tmp_path, 320)) as session:
        (first,) = on_disk(session)
        files.shut()
        with elsewhere(lambda: session.lease(first).arrays) as one:
            assert files.reading.wait(60)
            with elsewhere(lambda: session.lease(first).arrays) as two:
                wait_until(lambda: session.report().in_flight_waits > 2, "it joins")
                files.open()
        assert len(one) == len(two) == 1
        assert session.report().disk_promotions == session.report().demand_misses == 1
        gc.collect()
        wait_until(lambda: axes(session.pool.report())[1:3] == (0, 0), "nothing is in flight")


def test_a_lease_that_is_dropped_is_released() -> None:
    with make() as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        lease = session.lease(first)
        assert axes(session.pool.report()) == (32, 0, 40, 0)
        with pytest.raises(CacheResidencyError.Lifecycle):
            session.clear()
        del lease
        gc.collect()
        assert axes(session.pool.report()) == (32, 0, 0, 0)
        session.clear()


def test_a_released_lease_gives_no_arrays() -> None:
    with make() as session:
        grow(session, 4)
        with session.lease(session.blocks()[0]) as lease:
            assert not lease.released
        lease.release()
        with pytest.raises(ValueError, match="released"):
            _ = lease.arrays


def test_a_backend_that_reads_the_host_promotes_nothing(engine: str) -> None:
    with make(reads_host=True) as session:
        grow(session, 9)
        first = session.blocks()[0]
        session.demote(first)
        assert content(session) == list(range(9))
        assert session.phase(first) is Phase.HOST_UNBACKED
        assert session.report().demand_misses == 0
        with session.lease(first) as lease:
            assert engine != "numpy" or not lease.arrays[0].flags.writeable
            assert session.phase(first) is Phase.HOST_UNBACKED
            with pytest.raises(CacheResidencyError.Lifecycle):
                session.demote(first)


def test_an_old_copy_cannot_end_a_newer_one() -> None:
    copies = Copies()
    with make(copies=copies) as session:
        grow(session, 4)
        first = session.blocks()[0]
        demotions, core = session._parts.demotions, session._core
        copies.fails = lambda to, id: True
        with core.lock:
            old = demotions.begin(first)
        assert old is not None
        with pytest.raises(Runtime):
            demotions.finish(old)
        copies.fails = lambda to, id: False
        with core.lock:
            new = demotions.begin(first)
        assert new is not None
        demotions.finish(old)
        assert session.phase(first) is Phase.DEMOTING_TO_HOST
        demotions.finish(new)
        assert session.phase(first) is Phase.HOST_UNBACKED


def test_a_removed_block_is_missing() -> None:
    with make() as session:
        grow(session, 8)
        first = session.blocks()[0]
        session.remove(first)
        for call in (session.lease, session.remove, session.phase, session.demote):
            with pytest.raises(CacheResidencyError.Lifecycle) as caught:
                call(first)
            assert caught.value.error == CacheLifecycleError.MissingBlock(first)
