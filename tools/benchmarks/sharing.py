"""Shared prefixes: publishing a block while it is sealed, and adopting a prefix of 32,768 tokens.

Blocks of 16, 64 and 256 tokens, one layer and thirty; a token has 32 bytes per layer, so that bytes
weigh little beside the books. The peers are what the same prefix costs without a session: the chain
of its keys and one `pool.match`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
from rows import Row

import shmcache as sc

_PROMPT, _WIDTH = 32_768, 8
_IDS = np.arange(_PROMPT, dtype=np.uint32)


def run() -> list[Row]:
    """All rows; needs about twenty seconds."""
    return [
        row for layers, tokens in ((1, 16), (30, 64), (30, 256)) for row in _rows(layers, tokens)
    ]


def _rows(layers: int, tokens: int) -> list[Row]:
    what = f"{_PROMPT // tokens:,} blocks of {tokens} tokens, {layers} layer{'s' * (layers > 1)}"
    keys = np.ones((1, 1, tokens, _WIDTH), np.float16)
    with _pool(layers, tokens) as pool:
        with _session(pool, layers, tokens, "never") as alone:
            private = _grown(alone, layers, keys)
        with _session(pool, layers, tokens, "on_seal") as first:
            shared = _grown(first, layers, keys)
        names = sc.PrefixKeys(
            "peer", checkpoint_fingerprint="x", dtype="x", layout="x", block_tokens=tokens
        )
        for key in names.chain(_IDS):
            pool.allocate(64).publish(key.tobytes()).lease.release()
        bare = statistics.median(_ms(lambda: pool.match(names.chain(_IDS))) for _ in range(5))
        matched = []
        for _ in range(5):
            with _session(pool, layers, tokens, "never") as session:
                matched.append(_ms(lambda s=session: s.match(_IDS)))  # type: ignore[misc]
    return [
        Row(
            f"append, seal, publish: {what}", shared, "us", "without sharing", shared / private, ""
        ),
        Row(
            f"match: {what}",
            statistics.median(matched),
            "ms",
            "keys and pool.match",
            statistics.median(matched) / bare,
            "1 ms",
        ),
    ]


def _grown(session: sc.CacheSession, layers: int, keys: object) -> float:
    """Microseconds per block and layer."""
    session.feed(_IDS)
    blocks = _PROMPT // session.options.block_size_tokens
    steps = [(index, layer) for index in range(blocks) for layer in range(layers)]
    return _ms(lambda: [session.append(layer, keys, keys) for _, layer in steps]) / len(steps) * 1e3


def _ms(call: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start_ns) / 1e6


def _pool(layers: int, tokens: int) -> sc.CacheResidencyPool:
    arena = 2 * (2 * 2 * _PROMPT * _WIDTH * layers) + (64 << 20)
    limits = sc.CachePoolLimits(1 << 34, arena, 1 << 30, 0)
    return sc.CacheResidencyPool(limits, arena_bytes=arena, blocks_max=4 * _PROMPT // tokens)


def _session(
    pool: sc.CacheResidencyPool, layers: int, tokens: int, publish: Literal["on_seal", "never"]
) -> sc.CacheSession:
    model = sc.PromptCacheModelIdentity.new(
        model_family="bench",
        effective_model_type="bench",
        architecture_fingerprint="sha256:bench",
        layer_count=layers,
        global_layer_start=0,
        global_layer_end=layers,
        sink_tokens=0,
        topology=sc.PromptCacheTopology.default(),
        layer_layout=sc.PromptCacheModelIdentity.key_value_layouts(
            [None] * layers, heads=1, head_dim=_WIDTH
        ),
        layer_prefix_offsets=[0] * layers,
        state_segments=[sc.PromptCacheStateSegment.new("all", range(layers))],
    )
    return sc.CacheSession(
        pool,
        model=model,
        options=sc.PagedCacheOptions(tokens, 1 << 34, 1 << 20, 1),
        backend=sc.NumpyBackend(reads_host=True),
        sharing=sc.PrefixSharing(checkpoint_fingerprint="x", dtype="float16", publish=publish),
    )
