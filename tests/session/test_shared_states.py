"""State of fixed size beside shared prefixes: put into the pool, adopted, gone with its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmcache import (
    CacheResidencyError,
    CacheResidencyPool,
    CacheTier,
    LayerCachePolicy,
    MutableStateResidency,
    PoolingStateComponent,
    StateResidencyClass,
    StateTensorDimension,
    StateTensorDtype,
    StateTensorPolicy,
    StateTensorRole,
)
from shmcache.policy.identity import CacheBlockId
from shmcache.session.options import PagedCacheOptions
from shmcache.session.session import CacheSession
from tests.session.rig import FULL, Copies, content, model
from tests.session.test_sharing import IDS, compute, pool, session

pytestmark = pytest.mark.usefixtures("engine")
__all__ = ["pool"]

RECURRENT = StateTensorPolicy.new(
    StateTensorRole.Recurrent(),
    [StateTensorDimension.Batch(), StateTensorDimension.fixed(3)],
    StateTensorDtype.FLOAT32,
    MutableStateResidency.LAYER_SCOPED_OFFLOADABLE,
)
CONVOLUTION = StateTensorPolicy.new(
    StateTensorRole.Convolution(0),
    [StateTensorDimension.Batch(), StateTensorDimension.fixed(2)],
    StateTensorDtype.FLOATING,
    MutableStateResidency.ALWAYS_DEVICE_MUTABLE,
).optional()
POOLED = StateTensorPolicy.new_with_residency(
    StateTensorRole.Pooling(0, PoolingStateComponent.POOLED),
    [StateTensorDimension.Batch(), StateTensorDimension.PrefixTokensDiv(8)],
    StateTensorDtype.INT32,
    StateResidencyClass.SEALABLE_PAGED,
).when_prefix_at_least(8)
HYBRID = model(
    LayerCachePolicy.key_value_with_fixed_state(FULL, 1, 2, [RECURRENT, CONVOLUTION]),
    LayerCachePolicy.fixed_only([POOLED]),
)


def states(position: int, *, convolution: bool = True) -> dict[int, list[Any]]:
    """What the layers of HYBRID have after so many tokens."""
    return {
        0: [
            np.full((1, 3), position, np.float32),
            np.full((1, 2), -position, np.float16) if convolution else None,
        ],
        1: [np.arange(position // 8, dtype=np.int32)[None] + position],
    }


@pytest.mark.parametrize("convolution", [True, False])
def test_a_prefix_is_adopted_where_its_state_was_put(
    pool: CacheResidencyPool, convolution: bool
) -> None:
    with session(pool, HYBRID) as first, session(pool, HYBRID) as second:
        compute(first, IDS[:32])
        assert second.match(IDS) == 0  # keys and values alone are of no use
        assert second.state() is None
        for position in (8, 24):
            assert first.put_state(position, states(position, convolution=convolution))
        assert second.match(IDS) == 24
        assert content(second) == list(range(24))
        found = second.state()
        assert found is not None
        for layer, arrays in states(24, convolution=convolution).items():
            for got, wanted in zip(found[layer], arrays, strict=True):
                assert (got is None) == (wanted is None)
                if wanted is not None:
                    assert np.array_equal(got, wanted)
                    assert np.asarray(got).dtype == wanted.dtype
        second.clear()
        assert second.state() is None
        assert second.match(IDS[:23]) == 8
        assert second.put_state(8, states(8))  # it is there already


def test_state_that_does_not_fit_is_refused(pool: CacheResidencyPool) -> None:
    wrong = [
        (8, {}),
        (8, {0: states(8)[0], 1: []}),
        (8, {**states(8), 1: [None]}),  # required from 8 tokens on
        (8, {**states(8), 1: [np.zeros((1, 1), np.int64)]}),
        (16, states(8)),
    ]
    with session(pool, HYBRID) as first:
        compute(first, IDS[:16])
        for position, given in wrong:
            with pytest.raises(CacheResidencyError.ArrayMismatch):
                first.put_state(position, given)
        for position in (0, 6, 20):
            with pytest.raises(ValueError, match="state is shared after"):
                first.put_state(position, states(position))
    with session(pool) as second, pytest.raises(ValueError, match="no layer"):
        second.put_state(4, {})
    with (
        CacheSession(pool, model=HYBRID, options=PagedCacheOptions(4, 4096, 4096, 1)) as third,
        pytest.raises(ValueError, match="shares nothing"),
    ):
        third.state()


def test_a_state_goes_with_the_tokens_before_it(pool: CacheResidencyPool) -> None:
    with session(pool, HYBRID) as first, session(pool, HYBRID) as second:
        compute(first, IDS[:16])
        assert first.put_state(16, states(16))
        for end, there in ((16, True), (12, False)):
            assert second.match(IDS[:16]) == 16
            second.truncate(0, end)
            assert (second.state() is not None) == there
            second.clear()


OPTIONAL = model(LayerCachePolicy.key_value_with_fixed_state(FULL, 1, 2, [CONVOLUTION]))


def test_a_state_of_nothing_but_absent_tensors(pool: CacheResidencyPool) -> None:
    with session(pool, OPTIONAL) as first, session(pool, OPTIONAL) as second:
        compute(first, IDS[:8])
        assert first.put_state(8, {0: [None]})
        assert second.match(IDS[:8]) == 8
        assert second.state() == {0: (None,)}


def test_a_state_whose_copy_fails_is_refused(pool: CacheResidencyPool) -> None:
    """And may be put again."""
    copies = Copies()
    with session(pool, HYBRID, copies=copies) as first:
        compute(first, IDS[:8])
        refused = first.sharing_report().refused

        def fails(to: CacheTier, block: CacheBlockId) -> bool:
            return True

        copies.fails = fails
        with pytest.raises(RuntimeError, match="copy engine"):
            first.put_state(8, states(8))
        assert first.sharing_report().refused == refused + 1
        copies.fails = lambda to, block: False
        assert first.put_state(8, states(8))
