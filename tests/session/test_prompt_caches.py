"""Sessions saved as prompt caches and begun from them: in the arena once, or read from files."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace

from shmcache import (
    CacheResidencyError,
    CacheResidencyPool,
    CacheStoragePhase,
    PromptCacheDescriptor,
    PromptCacheError,
    PromptCacheOptions,
    PromptCachePersistenceError,
    PromptCacheReader,
    PromptCacheTopology,
    inspect_prompt_cache,
    prompt_cache_generations,
    prune_prompt_cache,
)
from shmcache.pool.values import CachePoolLimits
from shmcache.session.options import PagedCacheOptions
from shmcache.session.session import CacheSession
from tests.prompt.faults import failing
from tests.session.prompt_engine import FLAT, IDS, MODELS, Engine, described, saved, sharing
from tests.session.rig import axes, left_in


@pytest.fixture
def pool() -> Iterator[CacheResidencyPool]:
    limits = CachePoolLimits(1 << 20, 1 << 22, 1 << 20, 1 << 20)
    with CacheResidencyPool(limits, arena_bytes=1 << 22, blocks_max=256) as pool:
        yield pool
        usage, arena = pool.report(), pool.arena_report()
        assert arena.leased_bytes == arena.private_bytes == 0
        assert axes(usage) == (0, arena.published_bytes, 0, 0)
        assert not pool.verify().problems


@pytest.fixture
def other_pool() -> Iterator[CacheResidencyPool]:
    yield from pool.__wrapped__()  # type: ignore[attr-defined]


# There and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [True, False], ids=["arena", "files"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_is_what_was_saved(
    pool: CacheResidencyPool,
    other_pool: CacheResidencyPool,
    tmp_path: Path,
    name: str,
    dtype: Any,
    shares: bool,
) -> None:
    """And the session goes on as if it had computed it."""
    retains = name == "window and sinks"
    cache = saved(Engine(MODELS[name], pool, dtype, retains=retains), tmp_path / "cache")
    engine = Engine(MODELS[name], other_pool, dtype, shares=shares)
    with engine.load(cache, 18) as session:
        engine.check(session, 18)
        assert (session.sharing_report().published > 0) == shares
        engine.grow(session, 9)
        engine.check(session, 27)
        if shares:
            with engine.start() as matching:  # the tail went on to be a block with a name
                assert matching.match(IDS[:27]) == 24


@pytest.mark.parametrize("reads_host", [True, False])
def test_blocks_are_saved_from_wherever_they_are(
    other_pool: CacheResidencyPool, tmp_path: Path, reads_host: bool
) -> None:
    """Device, host, live file, a file of another cache; nothing is moved for it."""
    engine = Engine(FLAT, other_pool, shares=False, reads_host=reads_host)
    given = engine.given()
    given["options"] = given["options"].with_live_disk(tmp_path / "live", 1 << 16, 4)
    with CacheSession(other_pool, **given) as session:
        engine.grow(session, 14)
        first, second, _ = session.blocks(0)
        for id in (first, first, second):
            session.demote(id)
        phases = [session.phase(id) for id in session.blocks()]
        assert len(set(phases)) == 3
        session.save_prompt_cache(tmp_path / "one", tokens=IDS, descriptor=engine.descriptor)
        assert [session.phase(id) for id in session.blocks()] == phases
    with engine.load(tmp_path / "one", 14) as session:
        assert session.phase(session.blocks(0)[0]) is CacheStoragePhase.DISK_READY
        session.save_prompt_cache(tmp_path / "two", tokens=IDS, descriptor=engine.descriptor)
    with engine.load(tmp_path / "two", 14) as session:
        engine.check(session, 14)


def test_the_prefix_ends_with_the_last_position_of_all_layers(
    pool: CacheResidencyPool, tmp_path: Path
) -> None:
    """Or with the tokens handed in; pieces of truncations become whole blocks again."""
    engine = Engine(FLAT, pool)
    with engine.grow(engine.start(), 11) as session:
        for layer in (0, 1):
            session.truncate(layer, 6)
        engine.grow(session, 5)
        layer = next(iter(session._core.layers))
        session.append(0, *engine.arrays(layer, 11, 14))
        saved = session.save_prompt_cache(tmp_path / "a", tokens=IDS, descriptor=engine.descriptor)
        assert saved.total_prefix_tokens == 11
        assert [(b.start, b.end) for b in saved.blocks if not b.global_layer] == [
            (0, 4),
            (4, 8),
            (8, 11),
        ]
        shorter = session.save_prompt_cache(
            tmp_path / "b", tokens=IDS[:7], descriptor=engine.descriptor
        )
        assert shorter.total_prefix_tokens == 7
        with pytest.raises(ValueError, match="not the tokens"):
            session.save_prompt_cache(tmp_path / "c", tokens=IDS[1:], descriptor=engine.descriptor)
    for name, count in (("a", 11), ("b", 7)):
        with engine.load(tmp_path / name, count) as session:
            engine.check(session, count)


def test_a_gap_behind_the_protected_prefix_is_refused(
    pool: CacheResidencyPool, tmp_path: Path
) -> None:
    """A manifest has no gaps; nothing is written."""
    engine = Engine(MODELS["window and sinks"], pool)
    with (
        engine.grow(engine.start(), 30) as session,
        pytest.raises(CacheResidencyError.InvalidTokenRange),
    ):
        session.save_prompt_cache(tmp_path / "a", tokens=IDS, descriptor=engine.descriptor)
    with engine.start() as session, pytest.raises(PromptCacheError.Malformed):
        session.save_prompt_cache(tmp_path / "a", tokens=IDS, descriptor=engine.descriptor)
    assert not list(tmp_path.iterdir())


def test_who_may_not_publish_reads_files(
    pool: CacheResidencyPool, other_pool: CacheResidencyPool, tmp_path: Path
) -> None:
    """And a full arena, or a bound on leases, leaves the rest to files."""
    cache = saved(Engine(FLAT, pool), tmp_path / "cache")
    engine = Engine(FLAT, other_pool, publish="never")
    with engine.load(cache, 18) as session:
        assert other_pool.arena_report().stored == 0
        assert {session.phase(id) for id in session.blocks()} == {CacheStoragePhase.DISK_READY}
        assert session.usage().disk_bytes == 0
        assert session.report().current_disk_bytes > 0
        engine.check(session, 18)
    with engine.load(cache, 18, **sharing(engine, leased_bytes_max=700)) as session:
        assert len({session.phase(id) for id in session.blocks()}) == 2
        engine.check(session, 18)


def test_prune_keeps_what_a_session_rests_on(
    other_pool: CacheResidencyPool, tmp_path: Path
) -> None:
    engine = Engine(FLAT, other_pool, shares=False)
    cache = saved(engine, tmp_path / "cache")
    session = engine.load(cache, 18)
    engine.grow(session, 4)
    session.save_prompt_cache(
        cache,
        tokens=IDS,
        descriptor=engine.descriptor,
        options=PromptCacheOptions(replace_existing=True),
    )
    assert not prune_prompt_cache(cache)
    engine.check(session, 22)
    session.close()
    assert [one.kind.value for one in prune_prompt_cache(cache)] == ["replaced"]


# Identity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_family": "other"}, "field:model_family"),
        ({"effective_model_type": "other"}, "field:effective_model_type"),
        ({"architecture_fingerprint": "other"}, "field:architecture_fingerprint"),
        ({"sink_tokens": 1}, "field:sink_tokens"),
        ({"layer_count": 3}, "field:layer_count"),
        ({"layer_layout": MODELS["keys only"].layer_layout}, "field:layer_layout"),
        ({"layer_prefix_offsets": (0, -1)}, "field:layer_prefix_offsets"),
        ({"topology": PromptCacheTopology.default()}, "field:topology"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_model_finds_no_cache(
    other_pool: CacheResidencyPool, tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    """The descriptor is compared with the model, and the manifest with the descriptor."""
    engine = Engine(FLAT, other_pool)
    cache = saved(engine, tmp_path / "cache")
    if code == "field:topology":
        change = {"topology": PromptCacheTopology.new((2, 0), None, None, True)}
    other = replace(FLAT, **change)
    stored = other_pool.arena_report().stored
    with pytest.raises(PromptCacheError.Incompatible) as refused:
        engine.load(cache, 18, model=other)
    assert refused.value.code == code
    described = PromptCacheDescriptor.from_model_identity(other, "weights", "text", 1)
    with pytest.raises(PromptCacheError.Incompatible) as refused:
        engine.load(cache, 18, model=other, descriptor=described)
    assert refused.value.code == code
    assert other_pool.arena_report().stored == stored
    assert axes(other_pool.report())[0] == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda e: described(e, checkpoint_fingerprint="x"), "field:checkpoint_fingerprint"),
        (
            lambda e: described(e, prefix_content_fingerprint="x"),
            "field:prefix_content_fingerprint",
        ),
        (lambda e: described(e, batch_size=2), "field:batch_size"),
        (lambda e: sharing(e, checkpoint_fingerprint="x"), "field:checkpoint_fingerprint"),
        (lambda e: sharing(e, dtype="float32"), "block_dtype"),
        (lambda e: {"options": PagedCacheOptions(8, 1 << 16, 1 << 16, 1)}, "block_size"),
    ],
)
def test_another_prefix_or_layout_finds_no_cache(
    other_pool: CacheResidencyPool,
    tmp_path: Path,
    change: Callable[[Engine], dict[str, Any]],
    code: str,
) -> None:
    engine = Engine(FLAT, other_pool)
    cache = saved(engine, tmp_path / "cache")
    with pytest.raises(PromptCacheError.Incompatible) as refused:
        engine.load(cache, 18, **change(engine))
    assert refused.value.code == code
    for ids in (IDS[:17], IDS[:19], [*IDS[:17], 0]):
        with pytest.raises(PromptCacheError.PrefixIdentityMismatch):
            engine.load(cache, 18, tokens=ids)
    assert axes(other_pool.report())[0] == 0


# Damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [True, False], ids=["arena", "files"])
def test_no_flipped_bit_is_ever_published(
    pool: CacheResidencyPool, other_pool: CacheResidencyPool, tmp_path: Path, shares: bool
) -> None:
    """In any shard, of keys or values; blocks before it may be there, and are right."""
    cache = saved(Engine(FLAT, pool), tmp_path / "cache")
    with PromptCacheReader.open(cache) as reader:
        shards = [reader.path / block.shard for block in reader.manifest.blocks]
    engine = Engine(FLAT, other_pool, shares=shares)
    for shard in shards:
        whole = shard.read_bytes()
        for at in (len(whole) - 1, len(whole) - 40):
            damaged = bytearray(whole)
            damaged[at] ^= 1
            shard.write_bytes(damaged)
            engine.salt = f"{shard.name}-{at}"  # nobody has loaded it yet
            before = other_pool.arena_report().stored
            if shares:
                with pytest.raises(PromptCachePersistenceError.MalformedShard) as refused:
                    engine.load(cache, 18)
                assert refused.value.code == "payload_digest"
                assert other_pool.arena_report().leased_bytes == 0
                assert other_pool.arena_report().private_bytes == 0  # though the error is kept
                assert axes(other_pool.report())[0] == 0
            else:
                with (
                    pytest.raises((CacheResidencyError.Runtime, PromptCachePersistenceError)),
                    engine.load(cache, 18) as session,
                ):
                    engine.check(session, 18)
            shard.write_bytes(whole)
            published = other_pool.arena_report().stored - before
            with engine.start() as session:
                found = session.match(IDS[:18])
                assert published == 0 or found
                for layer in (0, 1):
                    assert session.position(layer) == found
                if found:
                    engine.check(session, found)
    with engine.load(cache, 18) as session:
        engine.check(session, 18)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_disk_that_fails_leaves_the_previous_cache(
    other_pool: CacheResidencyPool, tmp_path: Path, call: str, number: int
) -> None:
    """And no charge, and nothing that was staged."""
    engine = Engine(FLAT, other_pool, shares=False)
    cache = saved(engine, tmp_path / "cache")
    before, files = inspect_prompt_cache(cache), left_in(cache)
    with engine.grow(engine.start(), 26) as session:
        held = axes(other_pool.report())
        with (
            failing(call, 1, number) as fault,
            pytest.raises(PromptCachePersistenceError.Io) as refused,
        ):
            session.save_prompt_cache(
                cache,
                tokens=IDS,
                descriptor=engine.descriptor,
                options=PromptCacheOptions(replace_existing=True),
            )
        assert fault.happened
        assert isinstance(refused.value.source, OSError)
        assert refused.value.source.errno == number
        assert axes(other_pool.report()) == held
        if call != "rename":  # the second rename comes after the generation has its name
            assert left_in(cache) == files
            assert len(prompt_cache_generations(cache)) == 1
        assert inspect_prompt_cache(cache) == before
        for id in session.blocks():
            session.remove(id)  # nothing is leased
