"""The manifest: what decoding and validating 100,000 blocks costs, and whether that is linear."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from rows import Row

import shmcache as sc

_BLOCKS = 100_000
_TARGET_S = 2.0
_TOKENS = 4
_T = TypeVar("_T")


def run() -> list[Row]:
    """All rows; needs about twenty seconds and 600 MB."""
    small, large = _measured(_BLOCKS // 4), _measured(_BLOCKS)
    both, plain = large["decode and validate"], large["msgspec alone"]
    rows = [
        Row(
            name=f"{_BLOCKS:,} blocks, decode and validate",
            value=both,
            unit="s CPU",
            peer=f"{_TARGET_S:g} s",
            ratio=both / _TARGET_S,
            target="below 1",
        ),
        Row(
            name="the same, per block",
            value=both / _BLOCKS * 1e6,
            unit="us",
            peer=f"{_BLOCKS // 4:,} blocks",
            ratio=both / _BLOCKS / (small["decode and validate"] / (_BLOCKS // 4)),
            target="about 1: linear",
        ),
    ]
    for name in ("read_json", "from_document", "validate", "to_json"):
        rows.append(Row(name, large[name], "s", "msgspec to plain dicts", large[name] / plain))
    return rows


def _measured(count: int) -> dict[str, float]:
    """CPU seconds of each step for a manifest of `count` blocks; the best of three."""
    from shmcache.policy.json_text import read_json

    text = _text(count)
    results: list[dict[str, float]] = []
    for _ in range(3):
        seconds: dict[str, float] = {}
        _timed(seconds, "msgspec alone", lambda: msgspec.json.decode(text))
        document = _timed(seconds, "read_json", lambda: read_json(text))
        manifest = _timed(
            seconds, "from_document", lambda d=document: sc.PromptCacheManifest.from_document(d)
        )
        del document
        _timed(seconds, "validate", manifest.validate)
        assert _timed(seconds, "to_json", manifest.to_json) == text
        steps = ("read_json", "from_document", "validate")
        seconds["decode and validate"] = sum(seconds[step] for step in steps)
        results.append(seconds)
    return {name: min(one[name] for one in results) for name in results[0]}


def _timed(seconds: dict[str, float], name: str, call: Callable[[], _T]) -> _T:
    """CPU time: one thread does all of it, and waiting for a busy machine is no cost of ours."""
    started = time.process_time()
    result = call()
    seconds[name] = time.process_time() - started
    return result


def _text(count: int) -> bytes:
    layer = sc.LayerCachePolicy.key_value(sc.AttentionPolicy.Full(), 2, 4)
    shape = (1, 2, _TOKENS, 4)
    first = sc.PromptCacheBlock(
        global_layer=0,
        representation=sc.CacheRepresentation.KEY_VALUE,
        start=0,
        end=_TOKENS,
        rank=sc.CacheRankIdentity(stage_rank=0),
        shard="block-00000000.safetensors",
        first_array="keys",
        second_array="values",
        first_shape=shape,
        second_shape=shape,
        first_dtype="Float16",
        second_dtype="Float16",
        logical_bytes=128,
        payload_sha256="0" * 64,
    )
    blocks = (
        msgspec.structs.replace(
            first,
            start=_TOKENS * number,
            end=_TOKENS * (number + 1),
            shard=f"block-{number:08d}.safetensors",
        )
        for number in range(count)
    )
    return sc.PromptCacheManifest(
        schema_version=sc.PROMPT_CACHE_SCHEMA_VERSION,
        model_family="benchmark",
        effective_model_type="benchmark",
        checkpoint_fingerprint="weights",
        prefix_content_fingerprint="text",
        architecture_fingerprint="none",
        layer_count=2,
        global_layer_start=0,
        global_layer_end=1,
        block_size_tokens=_TOKENS,
        batch_size=1,
        total_prefix_tokens=_TOKENS * count,
        prefix_sha256="0" * 64,
        layer_layout=sc.LayerSchedule.new(1, [layer]),
        layer_prefix_offsets=(0,),
        state_segments=(sc.PromptCacheStateSegment.new("decoder", range(1)),),
        sink_tokens=0,
        topology=sc.PromptCacheTopology.new((2, 0), None, None, True),
        blocks=tuple(blocks),
        state_tensors=(),
    ).to_json()
