"""Wherever a session keeps its blocks, the decoder computes the same bits as from plain memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmcache import (
    CachePoolLimits,
    CacheResidencyPool,
    CacheSession,
    CacheTier,
    NumpyBackend,
    PagedCacheOptions,
)
from shmcache.workloads.decoder import ONE_BLAS_THREAD, Decoder, DecoderShape, Floats
from shmcache.workloads.session_store import SessionStore, cache_identity, prefix_sharing
from shmcache.workloads.weights import TINY, tiny_model
from tests.support import Worker
from tests.workloads.test_decoder import (
    ATOL,
    SHAPES,
    Gathered,
    decoder_of,
    digest,
    each_shape,
    logits_of_all,
    some_tokens,
)

BLOCK = 16
TOKENS = 75  # four blocks and a tail
ARENA = 1 << 25  # a slab for each size of blocks that a test has
LIMITS = CachePoolLimits(1 << 24, ARENA, 1 << 24, 1 << 24)


@pytest.fixture
def pool() -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool(LIMITS, arena_bytes=ARENA) as made:
        yield made


def reference(shape: DecoderShape, tokens: Sequence[int]) -> tuple[Floats, Gathered]:
    """The logits from plain arrays, read in the same pieces, and those arrays."""
    store = Gathered(shape, 2 * TOKENS, BLOCK)
    return logits_of_all(decoder_of(shape, BLOCK), tokens, store), store


@contextlib.contextmanager
def opened(
    pool: CacheResidencyPool,
    shape: DecoderShape,
    *,
    blocks: int = 100,
    disk: Path | None = None,
    host_blocks: int = 0,
    reads_host: bool = True,
    publish: str | None = "on_seal",
) -> Iterator[tuple[CacheSession, SessionStore]]:
    """A session with room for so many blocks per layer on its device, and in host memory.

    Those with sinks never leave the device.
    """
    model = tiny_model(shape)
    block_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * 4 * BLOCK
    blocks += -(-shape.sinks // BLOCK)
    options = PagedCacheOptions(BLOCK, blocks * block_bytes, host_blocks * block_bytes, 1)
    if disk is not None:
        options = options.with_live_disk(disk, 1 << 22, 8)
    with CacheSession(
        pool,
        model=cache_identity(model, BLOCK),
        options=options,
        backend=NumpyBackend(reads_host=reads_host),
        sharing=None if publish is None else prefix_sharing(model, BLOCK, publish=publish),
    ) as session:
        yield session, SessionStore(session, shape)


# Places ------------------------------------------------------------------------------------------

PLACES: dict[str, dict[str, Any]] = {
    "on the device": {"publish": None},
    "in private host memory": {"publish": None, "blocks": 2, "host_blocks": 100},
    "in the arena, unpublished": {"publish": "never", "blocks": 2, "host_blocks": 100},
    "promoted from the host": {
        "publish": None,
        "blocks": 2,
        "host_blocks": 100,
        "reads_host": False,
    },
    "published when sealed": {"publish": "on_seal"},
    "published when demoted": {"publish": "on_demote", "blocks": 2, "host_blocks": 100},
    "published, read on the device": {
        "publish": "on_seal",
        "blocks": 2,
        "host_blocks": 100,
        "reads_host": False,
    },
}


@each_shape
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_bits_do_not_depend_on_the_place(
    pool: CacheResidencyPool, shape: DecoderShape, place: dict[str, Any]
) -> None:
    tokens = some_tokens(TOKENS)
    expected, _ = reference(shape, tokens)
    with opened(pool, shape, **place) as (session, store):
        store.match(tokens)
        assert np.array_equal(logits_of_all(decoder_of(shape, BLOCK), tokens, store), expected)
        report, sharing = session.report(), session.sharing_report()
        fits = "blocks" not in place or None not in shape.windows or shape.sinks > 0
        if not fits:
            assert report.host_demotions > 0
        if place.get("publish") == "on_seal":
            assert sharing.published == 4 * len(set(shape.windows))
        elif not fits:
            assert (sharing.published > 0) == (place["publish"] == "on_demote")
        assert sharing.refused == 0


@each_shape
def test_bits_come_back_from_host_and_disk(
    pool: CacheResidencyPool, shape: DecoderShape, tmp_path: Path
) -> None:
    """Every block goes to the host, then to a live file, and is read from there by what follows."""
    tokens, decoder = some_tokens(TOKENS + 40), decoder_of(shape, BLOCK)
    plain = Gathered(shape, len(tokens), BLOCK)
    place: dict[str, Any] = {"disk": tmp_path, "host_blocks": 100, "publish": None}
    with opened(pool, shape, **place) as (session, store):
        for at in range(0, len(tokens), BLOCK):
            step = tokens[at : at + BLOCK]
            assert np.array_equal(decoder.step(step, store), decoder.step(step, plain))
            for id in session.blocks():
                while session.tier(id) is not CacheTier.DISK:
                    session.demote(id)


def test_a_small_host_sends_blocks_to_disk_by_itself(
    pool: CacheResidencyPool, tmp_path: Path
) -> None:
    tokens = some_tokens(TOKENS)
    expected, _ = reference(TINY, tokens)
    place: dict[str, Any] = {"blocks": 2, "host_blocks": 1, "disk": tmp_path, "publish": None}
    with opened(pool, TINY, **place) as (session, store):
        assert np.array_equal(logits_of_all(decoder_of(TINY, BLOCK), tokens, store), expected)
        assert session.report().disk_demotions > 0


# Cuts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("publish", [None, "on_seal", "on_demote"])
@pytest.mark.parametrize("end", [0, 16, 40, 64, 65, 74])
def test_a_truncation_leaves_the_blocks_that_would_be_there(
    pool: CacheResidencyPool, end: int, publish: str | None
) -> None:
    """In the middle of a sealed block too: what follows is computed as if nothing had been cut."""
    tokens, decoder = some_tokens(TOKENS), decoder_of(TINY, BLOCK)
    _, plain = reference(TINY, tokens)
    plain.tokens = end
    other = [*tokens[:end], *some_tokens(50, seed=2)]
    with opened(pool, TINY, publish=publish, blocks=2, host_blocks=100) as (session, store):
        store.match(tokens)
        decoder.prefill(tokens, store)
        store.truncate(end)
        assert store.tokens == end
        assert store.match(other) == end
        expected = decoder.prefill(other[end:], plain)
        assert np.array_equal(decoder.prefill(other[end:], store), expected)
        starts = {id.start for id in session.blocks(0)}
        assert starts == set(range(0, len(other) - BLOCK + 1, BLOCK))


def test_what_was_cut_is_not_published_under_other_names(pool: CacheResidencyPool) -> None:
    """Whoever matches either prompt afterwards computes with the bits of that prompt."""
    tokens, decoder = some_tokens(64), decoder_of(TINY, BLOCK)
    other = [*tokens[:32], *some_tokens(32, seed=2)]
    with opened(pool, TINY) as (_, store):
        store.match(tokens)
        decoder.prefill(tokens, store)
        store.truncate(32)
        store.match(other)
        decoder.prefill(other[32:], store)
    for prompt in (tokens, other):
        asked = [*prompt, 7]
        expected = decoder.prefill(asked, Gathered(TINY, TOKENS, BLOCK))
        with opened(pool, TINY) as (_, store):
            assert store.match(asked) == 64
            assert np.array_equal(decoder.prefill(asked[64:], store), expected)


@each_shape
def test_a_step_that_fails_can_be_done_again(pool: CacheResidencyPool, shape: DecoderShape) -> None:
    """Though it had sealed blocks of some layers by then, and is shared as if nothing had been."""
    tokens, decoder = some_tokens(TOKENS), decoder_of(shape, BLOCK)
    plain = Gathered(shape, TOKENS, BLOCK)
    decoder.prefill(tokens[:40], plain)
    decoder.step(tokens[40:64], plain)
    expected = decoder.prefill(tokens[64:], plain)
    for fails_at in range(1, shape.layers + 1):
        with opened(pool, shape) as (session, store):
            pool.evict(ARENA)
            assert store.match(tokens) == 0
            decoder.prefill(tokens[:40], store)
            failing(store, fails_at)
            with pytest.raises(MemoryError):
                decoder.step(tokens[40:64], store)
            assert store.tokens == 40
            decoder.step(tokens[40:64], store)
            assert np.array_equal(decoder.prefill(tokens[64:], store), expected)
            sharing = session.sharing_report()
            assert sharing.published == 4 * len(set(shape.windows))


def failing(store: SessionStore, call: int) -> None:
    """Let one of the next calls of `extend` raise when the layer has grown."""
    real: Callable[..., Any] = store.extend
    calls = itertools.count(1)

    def extend(layer: int, keys: Floats, values: Floats) -> Any:
        pieces = real(layer, keys, values)
        if next(calls) == call:
            raise MemoryError
        return pieces

    store.extend = extend  # type: ignore[method-assign]


# Sharing -----------------------------------------------------------------------------------------


@each_shape
@pytest.mark.parametrize("step", [BLOCK, 24, 64])
def test_an_adopted_prefix_gives_the_same_bits_and_any_split_the_same_argmax(
    pool: CacheResidencyPool, shape: DecoderShape, step: int
) -> None:
    tokens, decoder = some_tokens(TOKENS), decoder_of(shape, step)
    whole = decoder.prefill(tokens, Gathered(shape, TOKENS, BLOCK))
    with opened(pool, shape) as (_, store):
        assert store.match(tokens) == 0
        assert np.array_equal(decoder.prefill(tokens, store), whole)
    with opened(pool, shape) as (_, store):
        assert store.match(tokens) == store.tokens == 64
        adopted = decoder.prefill(tokens[64:], store)
    plain = Gathered(shape, TOKENS, BLOCK)
    for at in range(0, 64, step):
        decoder.step(tokens[at : min(at + step, 75)], plain)
    plain.tokens = 64
    assert np.array_equal(adopted, decoder.prefill(tokens[64:], plain))
    np.testing.assert_allclose(adopted, whole, rtol=0, atol=ATOL)
    assert adopted.argmax() == whole.argmax()


def test_what_a_window_has_left_behind_cannot_be_cut_back_to(pool: CacheResidencyPool) -> None:
    shape = SHAPES["mixed windows"]
    tokens, decoder = some_tokens(64), decoder_of(shape, BLOCK)
    with opened(pool, shape) as (_, store):
        store.match(tokens)
        decoder.prefill(tokens, store)
        with pytest.raises(ValueError, match="layer 1 has forgotten the tokens before 40"):
            store.truncate(40)
        assert store.tokens == 64
        store.truncate(60)
        _, plain = reference(shape, tokens)
        plain.tokens = 60
        assert np.array_equal(decoder.prefill([7], store), decoder.prefill([7], plain))


def test_generated_tokens_are_not_shared(pool: CacheResidencyPool) -> None:
    """One-token steps compute other bits than `prefill`: a key must not stand for either."""
    tokens, decoder = some_tokens(40), decoder_of(TINY, BLOCK)
    with opened(pool, TINY) as (session, store):
        store.match(tokens)
        logits = decoder.prefill(tokens, store)
        made = list(decoder.greedy(logits, store, tokens_max=30))
        assert store.tokens == 70
        assert session.sharing_report().published == 2
    with opened(pool, TINY) as (_, store):
        assert store.match([*tokens, *made, 1]) == 32


def test_the_last_token_is_always_computed(pool: CacheResidencyPool) -> None:
    tokens, decoder = some_tokens(64), decoder_of(TINY, BLOCK)
    with opened(pool, TINY) as (_, store):
        store.match(tokens)
        decoder.prefill(tokens, store)
    with opened(pool, TINY) as (_, store):
        assert store.match(tokens) == 48


def test_other_weights_shapes_and_steps_share_nothing(pool: CacheResidencyPool) -> None:
    tokens = some_tokens(64)
    with opened(pool, TINY) as (_, store):
        store.match(tokens)
        decoder_of(TINY, BLOCK).prefill(tokens, store)
    for model, step in (
        (tiny_model(seed=1), BLOCK),
        (tiny_model(SHAPES["mixed windows"]), BLOCK),
        (tiny_model(), 2 * BLOCK),
    ):
        with CacheSession(
            pool,
            model=cache_identity(model, BLOCK),
            options=PagedCacheOptions(BLOCK, 1 << 20, 0, 1),
            sharing=prefix_sharing(model, step),
        ) as session:
            assert SessionStore(session, model.shape).match(tokens) == 0


# Other processes ---------------------------------------------------------------------------------

PROGRAM = "from tests.workloads.test_session_store import answer_of"


def answer_of(name: str, shape: str, publish: str) -> list[object]:
    """One worker's answer to the same prompt: how much was known, and the logits' digest."""
    tokens, made = some_tokens(TOKENS), SHAPES[shape]
    roomy: dict[str, Any] = {"blocks": 2, "host_blocks": 100}
    with (
        CacheResidencyPool.attach(name) as pool,
        opened(pool, made, publish=publish, **roomy) as (_, store),
    ):
        known = store.match(tokens)
        decoder = decoder_of(made, BLOCK)
        return [known, digest(decoder.prefill(tokens[known:], store)), alone(decoder, tokens)]


def alone(decoder: Decoder, tokens: Sequence[int]) -> str:
    return digest(decoder.prefill(tokens, Gathered(decoder.shape, TOKENS, BLOCK)))


@pytest.mark.parametrize("publish", ["on_seal", "on_demote"])
def test_everybody_is_killed_and_the_next_generation_goes_on(pool_name: str, publish: str) -> None:
    """G7: what strangers computed, alive or dead, gives the bits that each would compute itself."""
    CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=ARENA).close()
    known: list[int] = []
    for _ in range(3):
        with (
            Worker(PROGRAM, env=ONE_BLAS_THREAD) as one,
            Worker(PROGRAM, env=ONE_BLAS_THREAD) as two,
        ):
            for shape in ("full", "mixed windows", "one window"):
                for worker in (one, two):
                    said = worker.call(
                        "answer_of(name, shape, publish)",
                        name=pool_name,
                        shape=shape,
                        publish=publish,
                    )
                    known.append(said[0])
                    assert said[1] == said[2]
        # leaving the block kills both
    assert known[0] == 0
    if publish == "on_seal":
        assert known[1::2] == [64] * 9
        assert known[6:] == [64] * 12
    else:
        assert known[1] > 0
        assert min(known[6:8]) > 0
    with CacheResidencyPool.observe(pool_name) as observed:
        observed.sweep()
        assert observed.verify().ok
        assert not observed.owners()
    CacheResidencyPool.destroy(pool_name)
