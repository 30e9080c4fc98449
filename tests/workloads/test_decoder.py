"""The decoder computes what a transformer must, and the same bits wherever its cache has been.

The two rules of equality: at the same split, a prefix that went out and came back gives identical
bits, in this process or another; at another split, the argmax is the same and logits are close.
"""

import hashlib
import itertools
import math
import mmap
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shmcache.workloads.decoder import (
    ONE_BLAS_THREAD,
    Decoder,
    DecoderShape,
    Floats,
    KeyValueStore,
    Piece,
)
from shmcache.workloads.kv_blocks import BlockLayout, BlockStore, layer_groups, visible_start
from shmcache.workloads.weights import TINY, tiny_model
from tests.support import Worker
from tests.workloads.naive_decoder import naive_logits

ATOL = 1e-4  # between different splits and with float64; logits are about 3
BLOCK = 8

SHAPES = {
    "full": TINY,
    "mixed windows": msgspec.structs.replace(TINY, windows=(None, 5, 12, 5)),
    "one window": msgspec.structs.replace(TINY, windows=(20,) * 4),
    "window of one": msgspec.structs.replace(TINY, windows=(None, 1, None, 1)),
    "one shared head": msgspec.structs.replace(TINY, kv_heads=1, windows=(None, 9, None, 9)),
    "no shared head": msgspec.structs.replace(TINY, kv_heads=4, rope_theta=100.0),
    "window and sinks": msgspec.structs.replace(TINY, windows=(9,) * 4, sinks=3),
    "mixed windows and many sinks": msgspec.structs.replace(
        TINY, windows=(None, 5, 12, 5), sinks=19
    ),
    "other widths": DecoderShape(3, 40, 6, 3, 10, 56, 258, (None, None, 7)),
}
LAYOUTS = [
    BlockLayout((*axes, "dim")) for axes in itertools.permutations(("layer", "kv", "head", "token"))
]
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(TINY.vocabulary), k=count)


def decoder_of(shape: DecoderShape, step_tokens: int = 16) -> Decoder:
    return Decoder(shape, tiny_model(shape).weights, step_tokens=step_tokens)


def kept(store: BlockStore) -> list[list[Floats]]:
    """The sealed blocks of each group."""
    groups = range(len(store.groups))
    return [
        [b.array for b in store.blocks(g) if b.start + store.block_tokens <= store.tokens]
        for g in groups
    ]


def logits_of_all(decoder: Decoder, tokens: Sequence[int], store: KeyValueStore) -> Floats:
    """After each token, appended in steps of the decoder's size."""
    steps = range(0, len(tokens), decoder.step_tokens)
    hidden = [decoder.step(tokens[at : at + decoder.step_tokens], store) for at in steps]
    return decoder.logits(np.concatenate(hidden))


# What it computes --------------------------------------------------------------------------------


@each_shape
@pytest.mark.parametrize(("step", "block"), [(64, 64), (16, 8), (7, 16), (1, 4), (24, 5)])
def test_it_computes_what_whole_matrices_do(shape: DecoderShape, step: int, block: int) -> None:
    tokens = some_tokens(50)
    decoder = decoder_of(shape, step)
    logits = logits_of_all(decoder, tokens, BlockStore(shape, block))
    naive = naive_logits(shape, tiny_model(shape).weights, tokens)
    np.testing.assert_allclose(logits, naive, rtol=0, atol=ATOL)
    assert (logits.argmax(axis=1) == naive.argmax(axis=1)).all()


@each_shape
def test_every_token_that_is_seen_matters(shape: DecoderShape) -> None:
    """Otherwise no comparison here would notice a wrong block."""
    tokens, decoder = some_tokens(30), decoder_of(shape)
    right = decoder.prefill(tokens, BlockStore(shape, BLOCK))
    for at in range(len(tokens) - 1 - (0 if None in shape.windows else 10), len(tokens)):
        other = [*tokens[:at], (tokens[at] + 1) % 258, *tokens[at + 1 :]]
        wrong = decoder.prefill(other, BlockStore(shape, BLOCK))
        assert np.abs(right - wrong).max() > 20 * ATOL


def test_greedy_text_is_what_whole_prefills_would_give() -> None:
    prompt, store = some_tokens(21), BlockStore(TINY, BLOCK)
    decoder = decoder_of(TINY)
    made = list(decoder.greedy(decoder.prefill(prompt, store), store, tokens_max=12))
    again = prompt[:]
    for _ in made:
        again.append(int(decoder.prefill(again, BlockStore(TINY, BLOCK)).argmax()))
    assert made == again[len(prompt) :]
    assert len(set(made)) > 3
    assert store.tokens == len(prompt) + len(made)


def test_greedy_text_stops() -> None:
    decoder, store = decoder_of(TINY), BlockStore(TINY, BLOCK)
    logits = decoder.prefill(some_tokens(21), store)
    first, second = list(decoder.greedy(logits, store, tokens_max=2))
    store = BlockStore(TINY, BLOCK)
    logits = decoder.prefill(some_tokens(21), store)
    assert list(decoder.greedy(logits, store, tokens_max=9, stop=(second,))) == [first]


# The same bits -----------------------------------------------------------------------------------


def gone_and_back(block: Floats, offset: int = 0) -> Floats:
    """Through bytes that cannot be written, which begin `offset` bytes behind a page's start."""
    page = mmap.mmap(-1, offset + block.nbytes)
    page[offset:] = block.tobytes()
    view = memoryview(page).toreadonly()[offset:]
    return np.frombuffer(view, np.float32).reshape(block.shape)


@each_shape
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("split", [(48, 1), (48, 23), (40, 30)])
def test_a_prefix_that_went_out_and_came_back_gives_the_same_bits(
    shape: DecoderShape, offset: int, split: tuple[int, int]
) -> None:
    decoder, tokens = decoder_of(shape), some_tokens(sum(split))
    prefix, suffix = tokens[: split[0]], tokens[split[0] :]
    untouched = BlockStore(shape, BLOCK)
    decoder.prefill(prefix, untouched)
    back = [[gone_and_back(block, offset) for block in blocks] for blocks in kept(untouched)]
    restored = BlockStore(shape, BLOCK, prefix_tokens=split[0], prefix=back)
    expected = logits_of_all(decoder, suffix, untouched)
    assert np.array_equal(logits_of_all(decoder, suffix, restored), expected)
    for group in range(len(untouched.groups)):
        ours, theirs = untouched.blocks(group), restored.blocks(group)
        filled = [min(BLOCK, untouched.tokens - block.start) for block in ours]
        assert [block.start for block in ours] == [block.start for block in theirs]
        for count, one, other in zip(filled, ours, theirs, strict=True):
            assert np.array_equal(one.ordered[..., :count, :], other.ordered[..., :count, :])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.axes[:4]))
def test_every_layout_gives_the_same_bits(layout: BlockLayout) -> None:
    shape, tokens = SHAPES["mixed windows"], some_tokens(43)
    decoder = decoder_of(shape)
    expected = decoder.prefill(tokens, BlockStore(shape, BLOCK))
    store = BlockStore(shape, BLOCK, layout=layout)
    decoder.prefill(tokens[:32], store)
    back = [[gone_and_back(block) for block in blocks] for blocks in kept(store)]
    store = BlockStore(shape, BLOCK, layout=layout, prefix_tokens=32, prefix=back)
    assert np.array_equal(decoder.prefill(tokens[32:], store), expected)


class Gathered:
    """A store as other engines have it: one array per layer. It hands it out in the same pieces."""

    def __init__(self, shape: DecoderShape, tokens_max: int, piece_tokens: int) -> None:
        size = (shape.layers, 2, shape.kv_heads, tokens_max, shape.head_dim)
        self._shape, self._piece_tokens = shape, piece_tokens
        self._arrays = np.full(size, np.nan, np.float32)
        self.tokens = 0

    def extend(self, layer: int, keys: Floats, values: Floats) -> list[Piece]:
        end, size, (k, v) = self.tokens + keys.shape[1], self._piece_tokens, self._arrays[layer]
        k[:, self.tokens : end], v[:, self.tokens : end] = keys, values
        seen = visible_start(self.tokens, self._shape.windows[layer])
        cuts = [(at, min(at + size, end)) for at in range(0, end, size)]
        cuts = [(at, to) for at, to in cuts if at < self._shape.sinks or to > seen]
        return [Piece(at, k[:, at:to], v[:, at:to]) for at, to in cuts]

    def advance(self, tokens: int) -> None:
        self.tokens += tokens


@each_shape
def test_blocks_give_the_bits_of_one_array_read_in_the_same_pieces(shape: DecoderShape) -> None:
    decoder, tokens = decoder_of(shape), some_tokens(61)
    expected = logits_of_all(decoder, tokens, Gathered(shape, 61, BLOCK))
    assert np.array_equal(logits_of_all(decoder, tokens, BlockStore(shape, BLOCK)), expected)


@each_shape
def test_a_prefix_of_whole_steps_gives_the_bits_of_a_full_recompute(shape: DecoderShape) -> None:
    """`prefill` cuts at multiples of the step, so the same tokens are computed together."""
    decoder, tokens = decoder_of(shape, step_tokens=16), some_tokens(59)
    expected = decoder.prefill(tokens, BlockStore(shape, BLOCK))
    for known in (16, 32, 48):
        store = BlockStore(shape, BLOCK)
        decoder.prefill(tokens[:known], store)
        reused = BlockStore(shape, BLOCK, prefix_tokens=known, prefix=kept(store))
        assert np.array_equal(decoder.prefill(tokens[known:], reused), expected)


@each_shape
def test_any_split_has_the_argmax_of_a_full_recompute(shape: DecoderShape) -> None:
    decoder, tokens = decoder_of(shape), some_tokens(59)
    whole = logits_of_all(decoder_of(shape, 64), tokens, BlockStore(shape, BLOCK))
    for known in range(BLOCK, 59, BLOCK):
        store = BlockStore(shape, BLOCK)
        decoder.prefill(tokens[:known], store)
        reused = BlockStore(shape, BLOCK, prefix_tokens=known, prefix=kept(store))
        logits = logits_of_all(decoder, tokens[known:], reused)
        np.testing.assert_allclose(logits, whole[known:], rtol=0, atol=ATOL)
        assert (logits.argmax(axis=1) == whole[known:].argmax(axis=1)).all()


# Another process ---------------------------------------------------------------------------------

PROGRAM = "from tests.workloads.test_decoder import first_process, second_process"


def first_process(name: str, path: str) -> list[str]:
    """Computes the prefix, leaves its blocks in the file, and goes on with its own."""
    shape, tokens = SHAPES[name], some_tokens(70)
    decoder, store = decoder_of(shape), BlockStore(shape, BLOCK)
    decoder.prefill(tokens[:48], store)
    Path(path).write_bytes(b"".join(b.tobytes() for blocks in kept(store) for b in blocks))
    counts = [str(len(blocks)) for blocks in kept(store)]
    return [digest(logits_of_all(decoder, tokens[48:], store)), weights_digest(shape), *counts]


def second_process(name: str, path: str, counts: list[str]) -> list[str]:
    """Reads the blocks from a mapping that it cannot write."""
    shape, tokens = SHAPES[name], some_tokens(70)
    with open(path, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    prefix, at = [], 0
    for group, count in enumerate(map(int, counts)):
        size = BlockStore(shape, BLOCK).block_shape(group)
        arrays = np.frombuffer(mapped, np.float32, count * math.prod(size), at)
        prefix.append(list(arrays.reshape(count, *size)))
        at += arrays.nbytes
    store = BlockStore(shape, BLOCK, prefix_tokens=48, prefix=prefix)
    logits = logits_of_all(decoder_of(shape), tokens[48:], store)
    return [digest(logits), weights_digest(shape), *counts]


def digest(array: Floats) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def weights_digest(shape: DecoderShape) -> str:
    weights = tiny_model(shape).weights
    arrays = [weights.embedding, *itertools.chain(*weights.layers), weights.final_norm]
    return digest(np.concatenate([array.ravel() for array in arrays]))


def test_another_process_gets_the_same_bits_from_the_blocks_of_the_first(tmp_path: Path) -> None:
    """And other bits from other blocks."""
    file = tmp_path / "blocks"
    ask_first, ask_second = "first_process(name, path)", "second_process(name, path, counts)"
    with (
        Worker(PROGRAM, env=ONE_BLAS_THREAD) as first,
        Worker(PROGRAM, env=ONE_BLAS_THREAD) as second,
    ):
        for name in ("full", "mixed windows"):
            ours = first.call(ask_first, name=name, path=str(file))
            theirs = second.call(ask_second, name=name, path=str(file), counts=ours[2:])
            assert theirs == ours
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 0x01  # the exponent of a value in the last block
        file.write_bytes(damaged)
        theirs = second.call(ask_second, counts=ours[2:])
        assert theirs[0] != ours[0]
        assert theirs[1:] == ours[1:]


# Windows and the length beside them --------------------------------------------------------------


def test_a_window_needs_only_its_own_blocks_and_the_length_of_the_prefix() -> None:
    """A prefix handed in whole, or only what the windows reach, gives the same bits; as the end of
    a shorter prefix it gives others: positions would be wrong.
    """
    shape, tokens = SHAPES["one window"], some_tokens(80)
    decoder, sealed = decoder_of(shape), []

    def seal(group: int, start: int, block: Floats) -> Floats:
        sealed.append(block)
        return block

    source = BlockStore(shape, BLOCK, seal=seal)
    decoder.prefill(tokens[:64], source)
    every, (remaining,) = sealed[:], kept(source)
    assert (len(every), len(remaining)) == (8, 3)  # 20 positions lie in 3 blocks of 8
    expected = decoder.prefill(tokens[64:], source)
    for blocks in (every, remaining):
        store = BlockStore(shape, BLOCK, prefix_tokens=64, prefix=[blocks])
        assert np.array_equal(decoder.prefill(tokens[64:], store), expected)
    wrong = BlockStore(shape, BLOCK, prefix_tokens=24, prefix=[remaining])
    assert np.abs(decoder.prefill(tokens[64:], wrong) - expected).max() > 20 * ATOL


def test_a_store_keeps_what_the_next_token_sees_and_no_more() -> None:
    shape = SHAPES["mixed windows"]
    decoder, store, tokens = decoder_of(shape, 1), BlockStore(shape, BLOCK), some_tokens(40)
    for count, token in enumerate(tokens, 1):
        decoder.step([token], store)
        for group, (window, _) in enumerate(store.groups):
            blocks = [block.start for block in store.blocks(group)]
            oldest = 0 if window is None else max(count - window + 1, 0)
            assert blocks == list(range(oldest // BLOCK * BLOCK, count, BLOCK))


# Blocks that the caller hands in -----------------------------------------------------------------


def test_layers_that_see_equally_far_share_blocks() -> None:
    shape = SHAPES["mixed windows"]
    assert layer_groups(shape) == ((None, (0,)), (5, (1, 3)), (12, (2,)))
    store = BlockStore(shape, BLOCK, layout=BlockLayout(("token", "kv", "layer", "head", "dim")))
    assert [store.block_shape(group) for group in range(3)] == [
        (8, 2, 1, 2, 16),
        (8, 2, 2, 2, 16),
        (8, 2, 1, 2, 16),
    ]


def test_blocks_come_from_the_caller_and_are_sealed_once_each_when_they_are_full() -> None:
    """What `seal` answers is what is read: here a copy, after which the written block is ruined."""
    shape, tokens = SHAPES["mixed windows"], some_tokens(45)
    allocated: list[tuple[int, int]] = []
    sealed: list[tuple[int, int]] = []

    def allocate(group: int, start: int, size: tuple[int, ...]) -> Floats:
        allocated.append((group, start))
        return np.full(size, np.nan, np.float32)

    def seal(group: int, start: int, block: Floats) -> Floats:
        sealed.append((group, start))
        assert not np.isnan(block).any()
        copy = gone_and_back(block)
        block.fill(np.nan)
        return copy

    store = BlockStore(shape, BLOCK, allocate=allocate, seal=seal)
    decoder = decoder_of(shape)
    logits = decoder.prefill(tokens, store)
    assert np.array_equal(logits, decoder.prefill(tokens, BlockStore(shape, BLOCK)))
    starts = range(0, 45, BLOCK)
    assert sorted(allocated) == [(group, start) for group in range(3) for start in starts]
    assert sorted(sealed) == [(group, start) for group in range(3) for start in starts[:-1]]
    assert store.blocks(0)[-1].array.flags.writeable


def test_a_step_that_fails_can_be_done_again() -> None:
    tokens, decoder = some_tokens(30), decoder_of(TINY)
    expected = decoder.prefill(tokens, BlockStore(TINY, BLOCK))
    store = BlockStore(TINY, BLOCK)
    decoder.prefill(tokens[:16], store)
    real, calls = store.extend, itertools.count(1)

    def extend(layer: int, keys: Floats, values: Floats) -> Sequence[Piece]:
        if next(calls) == 3:
            raise MemoryError
        return real(layer, keys, values)

    store.extend = extend  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        decoder.prefill(tokens[16:], store)
    assert store.tokens == 16
    assert np.array_equal(decoder.prefill(tokens[16:], store), expected)


def test_each_piece_is_read_once_and_may_vanish_afterwards() -> None:
    """A store may lend one piece at a time."""
    tokens, decoder, lender = some_tokens(40), decoder_of(TINY), BlockStore(TINY, BLOCK)
    expected = decoder.prefill(tokens, BlockStore(TINY, BLOCK))
    real = lender.extend

    def extend(layer: int, keys: Floats, values: Floats) -> Any:
        for piece in real(layer, keys, values):
            lent = Piece(piece.start, piece.keys.copy(), piece.values.copy())
            yield lent
            lent.keys.fill(np.nan)
            lent.values.fill(np.nan)

    lender.extend = extend  # type: ignore[method-assign]
    assert np.array_equal(decoder.prefill(tokens, lender), expected)


@pytest.mark.parametrize(
    ("prefix_tokens", "blocks"), [(9, 1), (16, 1), (16, 3), (8, 0)], ids=lambda value: str(value)
)
def test_a_prefix_with_holes_is_refused(prefix_tokens: int, blocks: int) -> None:
    block = np.zeros(BlockStore(TINY, BLOCK).block_shape(0), np.float32)
    with pytest.raises(ValueError, match="cannot be the end of a prefix"):
        BlockStore(TINY, BLOCK, prefix_tokens=prefix_tokens, prefix=[[block] * blocks])


@pytest.mark.parametrize(
    "block",
    [np.zeros((4, 2, 2, BLOCK, 16)), np.zeros((4, 2, 2, BLOCK, 15), np.float32)],
    ids=["float64", "width"],
)
def test_a_block_of_another_kind_is_refused(block: Any) -> None:
    with pytest.raises(ValueError, match="a block of group 0 is float32"):
        BlockStore(TINY, BLOCK, prefix_tokens=BLOCK, prefix=[[block]])
    with pytest.raises(ValueError, match="a block of group 0 is float32"):
        decoder_of(TINY).prefill([1], BlockStore(TINY, BLOCK, allocate=lambda *_: block))


def test_what_is_no_layout_no_shape_no_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="dim last"):
        BlockLayout(("dim", "layer", "kv", "head", "token"))
    with pytest.raises(ValueError, match="no decoder has this shape"):
        msgspec.structs.replace(TINY, windows=(None,))
    with pytest.raises(ValueError, match="nothing to prefill"):
        decoder_of(TINY).prefill([], BlockStore(TINY, BLOCK))
