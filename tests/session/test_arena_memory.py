"""Host copies in a real arena: the same session, blocks charged by the engine, groups in one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmcache.errors import CachePoolError, CacheResidencyError
from shmcache.policy.attention import AttentionPolicy
from shmcache.policy.identity import CacheTier
from shmcache.policy.layer import LayerCachePolicy
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits, CachePoolResource
from shmcache.session.arena_memory import ArenaHostMemory
from shmcache.session.options import PagedCacheOptions
from shmcache.session.session import CacheSession
from shmcache.session.slices import class_bytes, layer_groups
from shmcache.states.storage import CacheStoragePhase as Phase
from tests.session.rig import (
    FULL,
    Copies,
    Files,
    Session,
    axes,
    backend,
    content,
    elsewhere,
    grow,
    left_in,
    model,
    tiny,
)
from tests.support import wait_until

pytestmark = pytest.mark.usefixtures("engine")

ARENA = 256 << 10
BLOCK = 512  # two arrays of 16 bytes at multiples of 64, four layers


@pytest.fixture
def pool() -> Iterator[CacheResidencyPool]:
    limits = CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 1 << 20)
    with CacheResidencyPool(limits, arena_bytes=ARENA) as made:
        yield made
        gc.collect()
        made.verify()
        assert axes(made.report()) == (0, 0, 0, 0)
        assert made.arena_report().used_blocks == 0


def make(
    pool: CacheResidencyPool,
    *,
    device: int = 1 << 20,
    host: int = 1 << 20,
    folder: Path | None = None,
    copies: Copies | None = None,
    what: Any = None,
) -> CacheSession:
    what = what or tiny(4)
    options = PagedCacheOptions(4, device, host, 1)
    if folder is not None:
        options = options.with_live_disk(folder, 1 << 20, 4)
    return Session(
        pool,
        model=what,
        options=options,
        backend=backend(copies),
        memory=ArenaHostMemory(pool, layer_groups(what)),
    )


def test_layers_of_equal_policy_share_blocks() -> None:
    sliding = AttentionPolicy.sliding(4)
    what = model(
        LayerCachePolicy.key_value(FULL, 1, 2),
        LayerCachePolicy.key_value(sliding, 1, 2),
        LayerCachePolicy.key_value(FULL, 1, 2),
        LayerCachePolicy.key_value(FULL, 2, 2),
        first=7,
    )
    assert layer_groups(what) == [[7, 9], [8], [10]]


@pytest.mark.parametrize("nbytes", [1, 64, 65, 4095, 4096, 4097, 70000])
def test_the_bound_is_what_the_engine_charges(pool: CacheResidencyPool, nbytes: int) -> None:
    with pool.allocate(nbytes) as block:
        assert block.capacity == class_bytes(nbytes)


def test_a_group_is_charged_once_and_by_the_engine(pool: CacheResidencyPool) -> None:
    with make(pool) as session:
        for layer in range(4):
            grow(session, 8, layer=layer)
        blocks = session.blocks()
        for number, id in enumerate(blocks):
            session.demote(id)
            block_count = 1 if number == 0 else 2
            assert axes(pool.report())[1] == BLOCK * block_count, number
            assert session._core.sums().host == BLOCK * block_count
        assert session.usage().host_bytes == 0
        assert session.report().current_host_bytes == 2 * BLOCK
        assert pool.arena_report().used_blocks == 2
        for layer in range(4):
            assert content(session, layer) == list(range(8))
        assert axes(pool.report()) == (256, 0, 0, 0)  # all are back on the device


def test_what_is_read_is_never_written_over(pool: CacheResidencyPool) -> None:
    with make(pool) as session:
        grow(session, 4)
        grow(session, 4, layer=1)
        first, second = session.blocks()
        session.demote(first)
        session.demote(second)
        old = session._core.records[first].storage.host_resource
        assert old is not None
        session.remove(first)
        session.truncate(0, 0)
        session.append(0, *(np.full((1, 1, 4, 2), 99, np.float16),) * 2)
        session.demote(first)
        assert old.arrays[0][0, 0, :, 0].tolist() == [0, 1, 2, 3]
        assert pool.arena_report().used_blocks == 2
        new = session._core.records[first].storage.host_resource
        assert new is not None
        assert new.arrays[0][0, 0, 0, 0] == 99
        del old, new


def test_a_small_budget_moves_blocks_to_disk(pool: CacheResidencyPool, tmp_path: Path) -> None:
    with make(pool, device=320, host=2 * BLOCK, folder=tmp_path) as session:
        for _ in range(6):
            for layer in range(4):
                grow(session, 3, layer=layer)
        for layer in range(4):
            assert content(session, layer) == list(range(18))
        assert session._core.sums().host <= 2 * BLOCK
        assert session.report().disk_demotions > 0
        assert session.report().disk_promotions > 0
        session.flush()
    assert left_in(tmp_path) == []


def test_a_full_arena_is_a_refusal_of_the_host_axis(pool: CacheResidencyPool) -> None:
    with make(pool) as session:
        grow(session, 4)
        first = session.blocks()[0]
        held = []
        while True:
            try:
                held.append(pool.allocate(BLOCK))
            except Exception:  # noqa: BLE001 (full)
                break
        with pytest.raises(CacheResidencyError.Pool) as caught:
            session.demote(first)
        assert isinstance(caught.value.error, CachePoolError.BudgetExceeded)
        assert caught.value.error.resource is CachePoolResource.HOST
        assert session.phase(first) is Phase.DEVICE
        assert axes(pool.report())[2] == 0
        held.clear()
        session.demote(first)
        assert content(session) == [0, 1, 2, 3]


def test_a_failed_copy_gives_its_block_back(pool: CacheResidencyPool) -> None:
    copies = Copies()
    copies.fails = lambda to, id: to is CacheTier.HOST
    with make(pool, copies=copies) as session:
        grow(session, 4)
        with pytest.raises(CacheResidencyError.Runtime):
            session.demote(session.blocks()[0])
        gc.collect()
        assert axes(pool.report()) == (32, 0, 0, 0)


def test_a_write_that_runs_keeps_its_block(
    pool: CacheResidencyPool, tmp_path: Path, files: Files
) -> None:
    files.shut()
    with make(pool, folder=tmp_path) as session:
        grow(session, 4)
        first = session.blocks()[0]
        session.demote(first)
        with elsewhere(lambda: session.demote(first)):
            assert files.writing.wait(60)
            with elsewhere(session.clear) as cleared:
                wait_until(lambda: session.generation == 1, "the new generation")
                assert axes(pool.report()) == (0, BLOCK, 32, 32)
                assert session._core.sums().host == BLOCK
                files.open()
        assert cleared == [None]
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert left_in(tmp_path) == []


def test_a_group_too_large_for_a_block_has_several() -> None:
    limits = CachePoolLimits(1 << 20, 1 << 24, 1 << 20, 0)
    with (
        CacheResidencyPool(limits, arena_bytes=8 << 20, block_bytes_max=256) as small,
        make(small, what=tiny(3)) as session,
    ):
        for layer in range(3):
            grow(session, 4, layer=layer)
        for id in session.blocks():
            session.demote(id)
        assert small.arena_report().used_blocks == 2
        assert axes(small.report())[1] == 256 + 128
        for layer in range(3):
            assert content(session, layer) == [0, 1, 2, 3]
