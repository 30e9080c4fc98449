"""Sessions: what a sealed block, a demotion and a lease cost beside the bare copies.

A block has 16 tokens of 4 heads of 64 elements, keys and values, fp16: 16 KiB.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from rows import Row, median_ns

import shmcache as sc

_TOKENS, _HEADS, _WIDTH, _BLOCKS = 16, 4, 64, 400
_BLOCK_BYTES = 2 * _TOKENS * _HEADS * _WIDTH * 2


def run() -> list[Row]:
    """All rows; needs about two seconds."""
    keys = np.ones((1, _HEADS, _TOKENS, _WIDTH), np.float16)
    kept: list[object] = []
    bare = _each(lambda: kept.append((keys.copy(), keys.copy())))  # new memory, as in a session
    with _session(device_blocks=2 * _BLOCKS) as roomy, _session(device_blocks=8) as tight:
        sealed = _each(lambda: roomy.append(0, keys, keys))
        demoted = _each(lambda: tight.append(0, keys, keys))
        hit_id, cold = roomy.blocks()[0], iter(tight.blocks()[:100])
        hit = median_ns(lambda: roomy.lease(hit_id).release(), calls=2_000) / 1e3
        scanned = _once(lambda: sum(1 for _ in roomy.scan(0))) / _BLOCKS
        promoted = statistics.median(_once(partial(_touch, tight, id)) for id in cold)
        published = median_ns(roomy.rebalance, calls=2_000) / 1e3
    wanted = "bare copy + 30 us"
    return [
        Row(
            "append and seal a block", sealed, "us", "copies into new memory", sealed / bare, wanted
        ),
        Row("the same, and demote another one", demoted, "us", "the same", demoted / bare, ""),
        Row("lease + release, on the device", hit, "us"),
        Row("scan, per block on the device", scanned, "us"),
        Row("lease + release with a promotion and a demotion", promoted, "us"),
        Row("nothing over budget: publish and look", published, "us"),
    ]


def _touch(session: sc.CacheSession, id: sc.CacheBlockId) -> None:
    session.lease(id).release()


def _session(*, device_blocks: int) -> sc.CacheSession:
    layout = sc.PromptCacheModelIdentity.key_value_layouts([None], heads=_HEADS, head_dim=_WIDTH)
    model = sc.PromptCacheModelIdentity.new(
        model_family="bench",
        effective_model_type="bench",
        architecture_fingerprint="sha256:bench",
        layer_count=1,
        global_layer_start=0,
        global_layer_end=1,
        sink_tokens=0,
        topology=sc.PromptCacheTopology.default(),
        layer_layout=layout,
        layer_prefix_offsets=[0],
        state_segments=[sc.PromptCacheStateSegment.new("all", range(1))],
    )
    budget = device_blocks * _BLOCK_BYTES
    options = sc.PagedCacheOptions(_TOKENS, budget, 4 * _BLOCKS * _BLOCK_BYTES, 1)
    return sc.CacheSession(model=model, options=options)


def _each(call: Callable[[], object]) -> float:
    """Median of each of `_BLOCKS` calls, in us."""
    return statistics.median(_once(call) for _ in range(_BLOCKS))


def _once(call: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start_ns) / 1e3
