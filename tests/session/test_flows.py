"""What happens around the numbered checks: failures, cancellations, damage, handles that vanish."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmcache._core import CachePoolReservation
from shmcache.errors import CacheLifecycleError, CachePoolError, CacheResidencyError
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.policy.layer import LayerCachePolicy
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits, CachePoolResource
from shmcache.session.backend import BlockSpec, HostAllocation, HostCopy
from shmcache.session.numpy_backend import NumpyBackend, PrivateHostMemory
from shmcache.session.options import PagedCacheOptions
from shmcache.session.records import BlockFile
from shmcache.session.session import CacheSession
from shmcache.states.storage import CacheStoragePhase as Phase
from tests.session.counting import recounted
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
    published,
    shared_pool,
    tiny,
    tokens,
)
from tests.support import wait_until

Budget = CacheResidencyError.BudgetExceeded
Runtime = CacheResidencyError.Runtime


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch)


def on_disk(session: CacheSession, count: int = 1) -> list[CacheBlockId]:
    """That many blocks as files."""
    grow(session, 4 * count)
    blocks = session.blocks()
    for id in blocks:
        session.demote(id)
        session.demote(id)
    assert {session.phase(id) for id in blocks} == {Phase.DISK_READY}
    return blocks


def file_of(session: CacheSession, id: CacheBlockId) -> BlockFile:
    file = session._core.records[id].storage.backing
    assert file is not None
    return file


# Growth -------------------------------------------------------------------------------------------


def test_growth_never_evicts_the_recent_window() -> None:
    with make(device=64, recent=2) as session:
        grow(session, 8)
        with pytest.raises(Budget) as caught:
            grow(session, 1)
        assert caught.value == Budget(CacheTier.DEVICE, 72, 64)
        assert published(session) == (64, 0, 0, 0)


def test_an_append_over_several_blocks_is_one_piece(tmp_path: Path) -> None:
    with make(device=72, host=40, disk=(tmp_path, 64)) as session:
        grow(session, 6)
        before = session.blocks(), published(session), content(session)
        with pytest.raises(Budget) as caught:
            grow(session, 30)
        assert caught.value.tier is CacheTier.DISK
        session.flush()
        assert (session.blocks(), content(session)) == (before[0], before[2])
        assert session.position(0) == 6
        session.clear()
        assert axes(session.pool.report()) == (0, 0, 0, 0)
        assert left_in(tmp_path) == []


def test_without_a_live_disk_a_full_host_says_so() -> None:
    with make(device=64, host=40) as session:
        grow(session, 12)
        with pytest.raises(CacheResidencyError.LiveDiskRequired) as caught:
            grow(session, 5)
        assert caught.value == CacheResidencyError.LiveDiskRequired(40, 40)
        assert content(session) == list(range(12))


def test_two_sessions_share_the_host_axis_of_a_pool() -> None:
    with (
        CacheResidencyPool(CachePoolLimits(1 << 20, 60, 1 << 20, 0)) as pool,
        make(device=64, host=60, pool=pool) as first,
        make(device=64, host=60, pool=pool) as second,
    ):
        grow(first, 9)
        grow(second, 8)
        assert published(first) == (40, 40, 0, 0)
        with pytest.raises(CacheResidencyError.Pool) as caught:
            grow(second, 1)
        refused = CachePoolError.BudgetExceeded(CachePoolResource.HOST, 80, 60)
        assert caught.value.error == refused
        assert published(second) == (64, 0, 0, 0)
        first.clear()
        grow(second, 1)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ((tokens(0, 2),), "2 arrays are needed, not 1"),
        ((tokens(0, 2), tokens(0, 3)), "values has shape (1, 1, 3, 2), expected (1, 1, 2, 2)"),
        ((tokens(0, 2, width=3), tokens(0, 2)), "keys has shape (1, 1, 2, 3)"),
        ((tokens(0, 2)[0], tokens(0, 2)[0]), "keys has shape"),
        ((np.repeat(tokens(0, 2), 2, axis=0),) * 2, "batch 2 of float16"),
        ((tokens(0, 2).astype(np.float32),) * 2, "float32"),
    ],
)
def test_arrays_that_do_not_fit_are_named(arrays: tuple[object, ...], says: str) -> None:
    with make() as session:
        grow(session, 1)
        with pytest.raises(CacheResidencyError.ArrayMismatch) as caught:
            session.append(0, *arrays)
        assert says in str(caught.value)
        assert session.position(0) == 1


def test_only_arrays_of_layers_with_attention_are_taken() -> None:
    with make() as session:
        with pytest.raises(TypeError, match="ndarray"):
            session.append(0, [1], [2])
        with pytest.raises(ValueError, match="layer 7"):
            session.append(7, tokens(0, 1), tokens(0, 1))


# Reading ------------------------------------------------------------------------------------------


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
            assert lease.arrays[0][0, 0, :, 0].tolist() == [0, 1, 2, 3]  # type: ignore[attr-defined]
            lease.release()  # type: ignore[attr-defined]
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
        assert session.report().disk_promotions + session.report().host_promotions == 1
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


def test_a_backend_that_reads_the_host_promotes_nothing() -> None:
    with make(reads_host=True) as session:
        grow(session, 9)
        first = session.blocks()[0]
        session.demote(first)
        assert content(session) == list(range(9))
        assert session.phase(first) is Phase.HOST_UNBACKED
        assert session.report().demand_misses == 0
        with session.lease(first) as lease:
            assert not lease.arrays[0].flags.writeable
            assert session.phase(first) is Phase.HOST_UNBACKED
            with pytest.raises(CacheResidencyError.Lifecycle):
                session.demote(first)


# Disk ---------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def lead_elsewhere(path: Path) -> None:
    twin = path.with_name("twin")
    path.rename(twin)
    path.symlink_to(twin)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, lead_elsewhere])
def test_a_damaged_file_is_an_error_and_never_a_wrong_tensor(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with make(disk=(tmp_path, 320)) as session:
        first, second = on_disk(session, 2)
        damage(file_of(session, first).path)
        for _ in range(2):
            with pytest.raises(Runtime, match="could not be read"):
                session.lease(first)
        assert session.phase(first) is Phase.DISK_READY
        assert published(session) == axes(session.pool.report()) == (0, 0, 0, 64)
        assert session.report().failures == 2
        with session.lease(second) as lease:
            assert lease.arrays[0][0, 0, 0, 0] == 4
        session.truncate(0, 0)
        (tmp_path / "twin").unlink(missing_ok=True)


@pytest.mark.parametrize("number", [28, 5])
def test_a_write_that_fails_leaves_no_file(tmp_path: Path, files: Files, number: int) -> None:
    files.fail("write", number=number)
    with make(disk=(tmp_path, 320)) as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        with pytest.raises(Runtime, match="injected"):
            session.demote(first)
        session.rebalance()  # who waited was told: nobody else is
        assert session.phase(first) is Phase.HOST_UNBACKED
        assert axes(session.pool.report()) == (0, 40, 0, 0)
        assert left_in(tmp_path) == []
        files.fail()
        session.demote(first)  # the key of the failed write is free again
        assert content(session) == [0, 1, 2, 3]


def test_a_folder_that_cannot_be_written_to_leaves_no_file(tmp_path: Path) -> None:
    with make(disk=(tmp_path / "live", 320)) as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        (tmp_path / "live").rmdir()
        with pytest.raises(Runtime, match="No such file"):
            session.demote(first)
        assert axes(session.pool.report()) == (0, 40, 0, 0)


def test_the_folder_must_be_possible(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheResidencyError.Io) as caught:
        make(disk=(tmp_path / "file" / "below", 320))
    assert caught.value.action == "create_live_directory"


def test_a_full_queue_delays_and_is_counted(tmp_path: Path, files: Files) -> None:
    files.shut()
    with make(device=1 << 10, disk=(tmp_path, 640), queue=1) as session:
        grow(session, 12)
        blocks = session.blocks()
        for id in blocks:
            session.demote(id)
        with (
            elsewhere(lambda: session.demote(blocks[0])),
            elsewhere(lambda: session.demote(blocks[1])),
        ):
            assert files.writing.wait(60)
            wait_until(lambda: session.report().in_flight_write_blocks == 2, "one is queued")
            with elsewhere(lambda: session.demote(blocks[2])):
                wait_until(lambda: session.report().in_flight_write_blocks == 3, "one waits")
                files.open()
        report = session.report()
        assert report.queue_peak_occupancy == 1
        assert report.queue_capacity == 1
        assert report.peak_in_flight_write_bytes == 120
        assert len(left_in(tmp_path)) == 3


def test_live_files_are_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    with make(disk=(tmp_path, 320)) as session:
        (first,) = on_disk(session)
        arrays = load_file(file_of(session, first).path)
        assert sorted(arrays) == ["keys", "values"]
        assert np.array_equal(arrays["keys"], tokens(0, 4))
        assert np.array_equal(arrays["values"], -tokens(0, 4))


# Endings ------------------------------------------------------------------------------------------


def test_a_session_that_is_dropped_ends(tmp_path: Path) -> None:
    with shared_pool() as pool:
        session = make(device=64, host=80, disk=(tmp_path, 640), pool=pool)
        grow(session, 20)
        del session
        gc.collect()
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert pool.report().managers == 0
        wait_until(lambda: left_in(tmp_path) == [], "files are gone")


def test_closing_ends_a_write_that_runs(tmp_path: Path, files: Files) -> None:
    files.shut()
    with shared_pool() as pool:
        session = make(device=64, host=40, disk=(tmp_path, 640), pool=pool)
        grow(session, 9)
        assert files.writing.wait(60)
        with elsewhere(session.close) as closed:
            wait_until(lambda: session.closed, "it ends")
            files.open()
        assert closed == [None]
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert left_in(tmp_path) == []


def test_a_closed_session_answers_nothing() -> None:
    session = make()
    grow(session, 4)
    first = session.blocks()[0]
    lease = session.lease(first)
    session.close()
    lease.release()
    for call in (
        lambda: session.append(0, tokens(0, 1), tokens(0, 1)),
        lambda: session.lease(first),
        lambda: session.truncate(0, 0),
        session.clear,
        session.share,
        session.rebalance,
        session.blocks,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_forked_child_owns_nothing(tmp_path: Path) -> None:
    with make(disk=(tmp_path, 320)) as session:
        (first,) = on_disk(session)
        lease = session.lease(first)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            answer = b"it failed otherwise"
            try:
                session.position(0)
            except RuntimeError:
                lease.release()
                session.close()
                answer = b"refused"
            finally:
                os.write(writing, answer)
                os._exit(0)
        os.close(writing)
        assert os.read(reading, 100) == b"refused"
        os.close(reading)
        os.waitpid(child, 0)
        lease.release()
        assert left_in(tmp_path) == [file_of(session, first).path.name]
        assert content(session) == [0, 1, 2, 3]


def test_an_interrupted_change_is_recounted(monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as session:
        grow(session, 8)
        core = session._core
        with monkeypatch.context() as patched:

            def interrupted(*arguments: object) -> None:
                raise KeyboardInterrupt

            patched.setattr(core.victims, "place", interrupted)
            with pytest.raises(KeyboardInterrupt):
                grow(session, 4)
        with core.lock:
            assert core.sums() == recounted(core)
        assert content(session) == list(range(8))
        grow(session, 5)
        assert content(session) == list(range(13))


# Seams of a shared arena --------------------------------------------------------------------------


class GroupMemory(PrivateHostMemory):
    """All layers of one token range lie in one allocation that the pool charges by itself."""

    def __init__(self) -> None:
        super().__init__(1)
        self.allocations: dict[int, HostAllocation] = {}
        self.shared: dict[CacheBlockId, HostCopy] = {}

    def bound(self, id: CacheBlockId, spec: BlockSpec) -> int:
        return 0 if id.start in self.allocations else 100

    def allocate(
        self, id: CacheBlockId, spec: BlockSpec, reservation: CachePoolReservation
    ) -> HostCopy:
        made = super().allocate(id, spec, reservation)
        allocation = self.allocations.setdefault(id.start, HostAllocation(100, 0))
        return HostCopy(made.arrays, allocation, 32)

    def ready(self, id: CacheBlockId) -> HostCopy | None:
        return self.shared.get(id)


def grouped(memory: GroupMemory) -> CacheSession:
    return CacheSession(
        model=tiny(3),
        options=PagedCacheOptions(4, 1 << 10, 200, 1),
        backend=NumpyBackend(),
        memory=memory,
    )


def test_layers_in_one_allocation_are_counted_once() -> None:
    with grouped(GroupMemory()) as session:
        for layer in range(3):
            grow(session, 4, layer=layer)
        for id in session.blocks():
            session.demote(id)
        core = session._core
        assert core.sums().host == 100
        assert published(session) == (0, 0, 0, 0)
        assert session.report().current_host_bytes == 100
        assert sum(row.stats.current_host_bytes for row in session.report().per_layer) == 100
        first = session.blocks()[0]
        session.remove(first)
        assert core.sums().host == 100
        session.clear()
        assert core.sums().host == 0


def test_a_shared_block_leaves_the_device_for_free() -> None:
    memory = GroupMemory()
    with grouped(memory) as session:
        grow(session, 4)
        first = session.blocks()[0]
        arrays = tokens(0, 4), -tokens(0, 4)
        memory.shared[first] = HostCopy(arrays, HostAllocation(0, 0), 32)
        before = session.pool.report()
        session.demote(first)
        assert session.phase(first) is Phase.HOST_UNBACKED
        after = session.pool.report()
        assert axes(after) == (0, 0, 0, 0)
        assert after.peak_host_bytes == before.peak_host_bytes == 0
        assert session.report().host_demotions == 1
        assert content(session) == [0, 1, 2, 3]


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


def test_layers_may_differ_in_everything() -> None:
    what = model(
        LayerCachePolicy.key_value(FULL, 2, 3),
        LayerCachePolicy.key_only(FULL, 1, 5),
        LayerCachePolicy.compressed_latent_rotary(FULL, 6, 2),
        LayerCachePolicy.key_value(FULL, 1, 1),
        first=10,
    )
    given = {
        10: (np.arange(30.0).reshape(1, 2, 5, 3), -np.arange(30.0).reshape(1, 2, 5, 3)),
        11: (np.arange(25, dtype=np.int8).reshape(1, 1, 5, 5),),
        12: (np.ones((1, 5, 6), np.float32), np.zeros((1, 5, 2), np.float64)),
        13: (np.ones((1, 1, 5, 1)), np.zeros((1, 1, 5, 1))),
    }
    with make(what=what) as session:
        for layer, arrays in given.items():
            session.append(layer, *arrays)
        for id in session.blocks():
            session.demote(id)
        for layer, arrays in given.items():
            pieces = [piece.arrays for piece in session.scan(layer)]
            for number, array in enumerate(arrays):
                joined = np.concatenate([piece[number] for piece in pieces], axis=-2)
                assert np.array_equal(joined, array)
                assert joined.dtype == array.dtype
