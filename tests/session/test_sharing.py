"""Prefixes that workers compute for each other: published, matched, leased, claimed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmcache import (
    AttentionPolicy,
    CacheResidencyError,
    CacheResidencyPool,
    CacheStoragePhase,
    CacheTier,
    LayerCachePolicy,
    PrefixSharing,
    SegmentError,
)
from shmcache.pool.values import CachePoolLimits, CachePoolUsage
from shmcache.session.options import PagedCacheOptions
from shmcache.session.session import CacheSession
from tests.session.rig import FULL, Copies, Session, backend, content, grow, model
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("engine")

BLOCK = 4
IDS = list(range(100, 164))
KEY_VALUE = LayerCachePolicy.key_value(FULL, 1, 2)
SLIDING = LayerCachePolicy.key_value(AttentionPolicy.sliding(6), 1, 2)
TWO_FULL, MIXED = model(KEY_VALUE, KEY_VALUE), model(KEY_VALUE, KEY_VALUE, SLIDING, SLIDING)


@pytest.fixture
def pool() -> Iterator[CacheResidencyPool]:
    limits = CachePoolLimits(1 << 20, 8 << 20, 1 << 20, 1 << 20)
    with CacheResidencyPool(limits, arena_bytes=8 << 20, blocks_max=256) as pool:
        yield pool
        usage = pool.report()
        assert pool.arena_report().leased_bytes == pool.arena_report().private_bytes == 0
        assert usage.current_host_bytes == pool.arena_report().published_bytes
        assert usage.current_device_bytes == usage.current_transfer_in_flight_bytes == 0
        assert not pool.verify().problems


def session(
    pool: CacheResidencyPool,
    what: Any = TWO_FULL,
    *,
    device: int = 4096,
    host: int = 4096,
    reads_host: bool = True,
    copies: Copies | None = None,
    **sharing: Any,
) -> CacheSession:
    given = {"checkpoint_fingerprint": "weights", "dtype": "float16", **sharing}
    return Session(
        pool,
        model=what,
        options=PagedCacheOptions(BLOCK, device, host, 1),
        backend=backend(copies, reads_host=reads_host),
        sharing=PrefixSharing(**given),
    )


def compute(session: CacheSession, ids: list[int]) -> int:
    """Be the engine: match, then append what is missing, in steps of a block; what was matched."""
    found = session.match(ids)
    session.feed(ids)
    layers = [layer.global_layer for layer in session._core.layers]
    for start in range(found, len(ids), BLOCK):
        for layer in layers:
            grow(session, min(BLOCK, len(ids) - start), layer=layer)
    return found


def test_what_one_session_computed_another_leases(pool: CacheResidencyPool) -> None:
    with session(pool) as first, session(pool) as second:
        assert compute(first, IDS[:18]) == 0
        assert first.sharing_report().published == 4  # one per range, not times layers
        held = pool.report().current_host_bytes
        assert second.match(IDS) == 16
        assert content(second, 0) == content(second, 1) == list(range(16))
        assert pool.report().current_host_bytes == held  # once for both
        assert second.usage() == CachePoolUsage()
        assert second.sharing_report().matched_tokens == 16
        assert {second.phase(id) for id in second.blocks()} == {CacheStoragePhase.HOST_UNBACKED}
        assert second.match(IDS) == 16  # nothing more


def test_a_prefix_ends_with_the_last_equal_block(pool: CacheResidencyPool) -> None:
    with session(pool) as first, session(pool) as second:
        compute(first, IDS[:16])
        assert second.match([*IDS[:9], 0, 0, 0, 0]) == 8
        second.feed([0, 0], start=8)
        for layer in (0, 1):
            grow(second, 2, layer=layer)
        assert content(second) == list(range(10))


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "tenant"},
        {"checkpoint_fingerprint": "tuned"},
        {"layout": "interleaved"},
        {"dtype": ml_dtypes.bfloat16},
    ],
)
def test_who_differs_in_anything_finds_nothing(
    pool: CacheResidencyPool, other: dict[str, Any]
) -> None:
    with session(pool) as first, session(pool, **other) as second:
        compute(first, IDS[:16])
        assert second.match(IDS) == 0


def test_a_device_that_cannot_read_the_arena_gets_copies(pool: CacheResidencyPool) -> None:
    """And what it has published it demotes for free."""
    copies = Copies()
    with (
        session(pool, reads_host=False, copies=copies) as first,
        session(pool, reads_host=False) as second,
    ):
        compute(first, IDS[:8])
        started = copies.started
        block = first.blocks(0)[0]
        assert first.tier(block) is CacheTier.DEVICE
        first.demote(block)
        assert (first.tier(block), copies.started) == (CacheTier.HOST, started)
        assert first.usage().host_bytes == 0
        assert second.match(IDS) == 8
        assert content(second) == list(range(8))
        assert second.tier(second.blocks(0)[0]) is CacheTier.DEVICE


def test_a_window_needs_only_what_it_sees(pool: CacheResidencyPool) -> None:
    with session(pool, MIXED) as first, session(pool, MIXED) as second:
        compute(first, IDS[:32])
        assert second.match(IDS) == 32
        assert [id.start for id in second.blocks(0)] == list(range(0, 32, BLOCK))
        assert [id.start for id in second.blocks(2)] == [24, 28]
        assert content(second, 2) == content(first, 2)


def test_a_window_that_lost_a_block_shortens_the_prefix(pool: CacheResidencyPool) -> None:
    with session(pool, MIXED) as first:
        compute(first, IDS[:32])
        keys = first._parts.sharing.groups[1].keys  # type: ignore[union-attr]
    with session(pool, MIXED) as second:
        assert pool.invalidate(keys[6]) == 1
        assert second.match(IDS) == 24
        assert content(second, 2) == list(range(16, 24))
        assert len(second.blocks(0)) == 6


def test_sinks_belong_to_every_window(pool: CacheResidencyPool) -> None:
    what = model(SLIDING, sink_tokens=5)
    with session(pool, what) as first, session(pool, what) as second:
        compute(first, IDS[:32])
        assert second.match(IDS) == 32
        assert [id.start for id in second.blocks(0)] == [0, 4, 24, 28]


def test_what_a_truncation_changed_is_shared_under_its_new_name(pool: CacheResidencyPool) -> None:
    """Mutant: a session that forgets which layers still have the old tokens publishes a mixture."""
    with session(pool) as first, session(pool) as second, session(pool) as third:
        compute(first, IDS[:8])
        first.truncate(0, 4)
        first.feed([7, 7, 7, 7], start=4)
        grow(first, 4, layer=0)  # layer 1 still has the old tokens
        assert first.sharing_report().published == 2
        first.truncate(1, 4)
        grow(first, 4, layer=1)
        assert first.sharing_report().published == 3
        assert second.match([*IDS[:4], 7, 7, 7, 7]) == 8
        assert third.match(IDS) == 8


@pytest.mark.parametrize("how", ["clear", "truncate"])
def test_a_cut_that_could_not_delete_its_files_forgets_the_tokens(
    pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What comes next must not be published under the names of what was there."""

    def fail(files: object) -> None:
        raise OSError("a file that cannot be deleted")

    with session(pool) as first, session(pool) as second:
        first.feed(IDS[:8])  # one block is there, the next one is named only
        for layer in (0, 1):
            grow(first, 4, layer=layer)
        with monkeypatch.context() as broken:
            broken.setattr("shmcache.session.shrinking.remove_files", fail)
            for layer in [0] if how == "clear" else [0, 1]:
                with pytest.raises(OSError, match="cannot be deleted"):
                    first.clear() if how == "clear" else first.truncate(layer, 0)
        compute(first, IDS[20:28])
        assert second.match(IDS[:8]) == 4
        second.clear()
        assert second.match(IDS[20:28]) == 8


def test_tokens_that_nobody_named_stay_private(pool: CacheResidencyPool) -> None:
    with session(pool) as first:
        for layer in (0, 1):
            grow(first, 8, layer=layer)
        assert first.sharing_report().published == 0
        with pytest.raises(ValueError, match="token id"):
            first.feed([-1])
        first.feed(IDS[:4])
        with pytest.raises(ValueError, match="do not begin"):
            first.match([0, 1, 2, 3])
        assert first.match(IDS) == 8  # it has them already


def test_ids_that_are_told_twice_must_be_the_same(pool: CacheResidencyPool) -> None:
    """Mutant: an engine that repeats a prompt after a match names blocks that nobody computed."""
    with session(pool) as first, session(pool) as second:
        compute(first, IDS[:8])
        assert second.match(IDS[:12]) == 8
        second.feed(IDS[:12])
        second.feed(IDS[4:10], start=4)
        for wrong, start in ((IDS[:12], 8), ([0], 3), ([1, 2], 11), ([1], 13)):
            with pytest.raises(ValueError, match="know"):
                second.feed(wrong, start=start)
        for layer in (0, 1):
            grow(second, 4, layer=layer)
        assert first.match(IDS[:12]) == 12


@pytest.mark.parametrize("when", ["on_demote", "never"])
def test_published_when_it_was_asked_for(pool: CacheResidencyPool, when: Any) -> None:
    """Each token has 8 bytes per layer: the device holds two blocks of each of two layers."""
    with session(pool, publish=when, device=2 * 2 * 32) as first:
        compute(first, IDS[:8])
        assert first.sharing_report().published == 0
        session_held = first.usage().host_bytes + pool.arena_report().private_bytes
        assert session_held == 0
        first.feed(IDS[8:16], start=8)
        for layer in (0, 1):
            grow(first, 8, layer=layer)
        assert content(first, 0) == content(first, 1) == list(range(16))
        assert first.sharing_report().published == (2 if when == "on_demote" else 0)
        assert (pool.arena_report().private_bytes == 0) == (when == "on_demote")


def test_demoting_by_hand_publishes_too(pool: CacheResidencyPool) -> None:
    with session(pool, publish="on_demote") as first:
        compute(first, IDS[:8])
        first.demote(first.blocks(1)[0])
        assert first.sharing_report().published == 1
        assert pool.arena_report().private_bytes == 0


def test_a_session_leases_no_more_than_it_may(pool: CacheResidencyPool) -> None:
    with session(pool) as first, session(pool, leased_bytes_max=3 * 256) as second:
        compute(first, IDS[:32])
        assert second.match(IDS) == 12
        assert second.sharing_report().leased_bytes == 3 * 256
        second.feed(IDS[12:16], start=12)
        for layer in (0, 1):
            grow(second, 4, layer=layer)
        assert second.sharing_report().leased_bytes == 3 * 256
        assert content(second) == list(range(16))


def test_no_room_to_publish_fails_no_append() -> None:
    limits = CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 0)
    with (
        CacheResidencyPool(limits, arena_bytes=1 << 16, blocks_max=2) as pool,
        session(pool) as first,
    ):
        compute(first, IDS[:16])
        report = first.sharing_report()
        assert (report.published, report.refused) == (2, 2)
        assert content(first) == list(range(16))


def test_a_failed_copy_fails_no_append(pool: CacheResidencyPool) -> None:
    copies = Copies()
    copies.fails = lambda to, id: True
    with session(pool, reads_host=False, copies=copies) as first:
        compute(first, IDS[:8])
        assert first.sharing_report().refused == 2
        copies.fails = lambda to, id: False
        assert content(first, 0) == content(first, 1) == list(range(8))


def test_a_layer_that_does_not_fit_the_others_is_refused(pool: CacheResidencyPool) -> None:
    with session(pool) as first:
        keys = np.zeros((1, 1, 4, 2), np.float32)
        with pytest.raises(CacheResidencyError.ArrayMismatch, match="float16"):
            first.append(0, keys, keys)
        grow(first, 4)
        assert content(first) == list(range(4))


def test_sharing_needs_an_arena() -> None:
    limits = CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 0)
    with CacheResidencyPool(limits) as pool, pytest.raises(SegmentError.NoArena):
        session(pool)


def test_a_group_that_is_too_large_for_a_block_has_several(pool: CacheResidencyPool) -> None:
    limits = CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 0)
    with CacheResidencyPool(
        limits, arena_bytes=1 << 16, blocks_max=512, block_bytes_max=256
    ) as small:
        what = model(*[KEY_VALUE] * 4)
        with session(small, what) as first, session(small, what) as second:
            compute(first, IDS[:8])
            assert first.sharing_report().published == 4
            assert second.match(IDS) == 8
            assert content(second, 3) == list(range(8))


def test_a_second_worker_waits_for_the_first(pool: CacheResidencyPool) -> None:
    """Block after block, to the end of the prefix; nothing is computed twice."""
    with session(pool) as first, session(pool) as second:
        assert first.match(IDS[:32]) == 0
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.append(second.match(IDS[:32], timeout=PATIENCE_S))
        )
        thread.start()
        first.feed(IDS[:32])
        for _ in range(8):
            for layer in (0, 1):
                grow(first, BLOCK, layer=layer)
        thread.join(PATIENCE_S)
        assert found == [32]
        assert second.sharing_report().published == 0


def test_a_waiter_goes_on_where_its_forerunner_stopped(pool: CacheResidencyPool) -> None:
    with session(pool) as second:
        first = session(pool)
        assert first.match(IDS[:32]) == 0
        first.feed(IDS[:32])
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.append(second.match(IDS[:32], timeout=PATIENCE_S))
        )
        thread.start()
        for layer in (0, 1):
            grow(first, 8, layer=layer)
        first.close()
        thread.join(PATIENCE_S)
        assert found == [8]


def test_a_leased_prefix_outlives_its_maker_and_its_reader(
    pool: CacheResidencyPool, engine: str
) -> None:
    """Arrays that attention keeps are safe to read whatever becomes of the session."""
    first = session(pool)
    compute(first, IDS[:8])
    first.close()
    second = session(pool)
    assert second.match(IDS) == 8
    with second.lease(second.blocks(0)[0]) as lease:
        keys = lease.arrays[0]
    second.close()
    pool.evict(1 << 20)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    assert engine != "numpy" or not keys.flags.writeable
    del keys, lease
    assert pool.arena_report().leased_bytes == 0


def test_a_cut_into_an_adopted_block_copies_what_stays(pool: CacheResidencyPool) -> None:
    with session(pool) as first, session(pool) as second:
        compute(first, IDS[:16])
        assert second.match(IDS) == 16
        for layer in (0, 1):
            second.truncate(layer, 10)
        assert content(second) == list(range(10))
        second.feed([5, 6], start=10)
        for layer in (0, 1):
            grow(second, 2, layer=layer)
        assert second.sharing_report().published == 0  # 8 to 10 and 10 to 12: no whole block
        second.clear()
        assert second.match(IDS) == 16


@pytest.mark.parametrize("wrong", [{"publish": "later"}, {"leased_bytes_max": -1}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrefixSharing(checkpoint_fingerprint="weights", dtype="float16", **wrong)


def test_a_blank_fingerprint_shares_nothing(pool: CacheResidencyPool) -> None:
    with pytest.raises(ValueError, match="blank"):
        session(pool, checkpoint_fingerprint=" ")
    assert pool.report().current_device_bytes == 0
