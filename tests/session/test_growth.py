"""What is appended: refused as a whole, checked by name, of any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmcache.errors import CachePoolError, CacheResidencyError
from shmcache.policy.identity import CacheTier
from shmcache.policy.layer import LayerCachePolicy
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits, CachePoolResource
from tests.session.rig import (
    FULL,
    axes,
    content,
    grow,
    left_in,
    make,
    model,
    published,
    tokens,
)

pytestmark = pytest.mark.usefixtures("engine")

Budget = CacheResidencyError.BudgetExceeded


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
        with pytest.raises(TypeError, match="array must be a"):
            session.append(0, [1], [2])
        with pytest.raises(ValueError, match="layer 7"):
            session.append(7, tokens(0, 1), tokens(0, 1))


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
