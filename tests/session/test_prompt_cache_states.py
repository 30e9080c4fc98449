"""Fixed state in prompt caches: saved with its prefix, loaded into the arena, all or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmcache import (
    CacheResidencyError,
    CacheResidencyPool,
    PromptCacheError,
    PromptCachePersistenceError,
    PromptCacheReader,
)
from shmcache.pool.values import CachePoolLimits
from shmcache.session.session import CacheSession
from tests.session.prompt_engine import IDS, Engine, sharing
from tests.session.test_shared_states import HYBRID, states


@pytest.fixture
def pool() -> Iterator[CacheResidencyPool]:
    limits = CachePoolLimits(1 << 20, 1 << 22, 1 << 20, 1 << 20)
    with CacheResidencyPool(limits, arena_bytes=1 << 22, blocks_max=256) as pool:
        yield pool
        arena = pool.arena_report()
        assert arena.leased_bytes == arena.private_bytes == 0
        assert not pool.verify().problems


def saved(engine: Engine, cache: Path, **other: Any) -> Path:
    """20 tokens, of which 16 have a state."""
    with engine.grow(engine.start(), 20) as session:
        for position in (8, 16):
            assert session.put_state(position, states(position, **other))
        made = session.save_prompt_cache(cache, tokens=IDS, descriptor=engine.descriptor)
        assert made.total_prefix_tokens == 16
    return cache


def check(session: CacheSession, **other: Any) -> None:
    found = session.state()
    assert found is not None
    for layer, arrays in states(16, **other).items():
        for got, wanted in zip(found[layer], arrays, strict=True):
            assert (got is None) == (wanted is None)
            if wanted is not None:
                assert got.dtype == wanted.dtype
                assert np.array_equal(got, wanted)


@pytest.mark.parametrize("convolution", [True, False])
def test_a_prefix_comes_with_its_state(
    pool: CacheResidencyPool, tmp_path: Path, convolution: bool
) -> None:
    """The newest one; under another salt, so nothing is in the pool. Then others match it."""
    cache = saved(Engine(HYBRID, pool), tmp_path / "cache", convolution=convolution)
    engine = Engine(HYBRID, pool, salt="other")
    with engine.load(cache, 16) as session:
        engine.check(session, 16)
        check(session, convolution=convolution)
        with engine.start() as other:
            assert other.match(IDS[:20]) == 16
            check(other, convolution=convolution)


def test_without_its_state_a_prefix_is_refused(pool: CacheResidencyPool, tmp_path: Path) -> None:
    """Not put, nowhere to go to, of another type, damaged."""
    engine = Engine(HYBRID, pool)
    with engine.grow(engine.start(), 16) as session, pytest.raises(PromptCacheError.Malformed):
        session.save_prompt_cache(tmp_path / "none", tokens=IDS, descriptor=engine.descriptor)
    assert not list(tmp_path.iterdir())
    cache = saved(engine, tmp_path / "cache")
    with pytest.raises(PromptCacheError.Incompatible) as refused:
        engine.load(cache, 16, sharing=None)
    assert refused.value.code == "state_tensors"
    with pytest.raises(CacheResidencyError.Runtime):
        engine.load(cache, 16, **sharing(engine, salt="a", publish="never"))
    with pytest.raises(PromptCacheError.Incompatible) as refused:
        engine.load(cache, 16, **sharing(engine, salt="b", state_dtype="float32"))
    assert refused.value.code == "state_dtype"
    with PromptCacheReader.open(cache) as reader:
        shards = [reader.path / tensor.shard for tensor in reader.manifest.state_tensors]
    for shard in shards:
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(PromptCachePersistenceError.MalformedShard):
            engine.load(cache, 16, **sharing(engine, salt=shard.name))
        shard.write_bytes(whole)
        with Engine(HYBRID, pool, salt=shard.name).start() as session:
            assert session.match(IDS[:16]) == 0
