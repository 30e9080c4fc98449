"""What a manifest must satisfy in itself: mutations of two good ones (prompt_cache 7 and 8)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import example as sample
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import I32_MAX, U64_MAX
from shmcache.errors import CachePolicyError, PromptCacheError
from shmcache.policy.attention import AttentionPolicy, LayerSchedule
from shmcache.policy.layer import LayerCachePolicy
from shmcache.policy.manifest import PromptCacheBlock, PromptCacheManifest
from shmcache.policy.manifest_rules import is_safe_shard_path
from shmcache.policy.state_kinds import StateTensorPresence
from tests.policy.samples import hybrid, minimal
from tests.policy.test_manifest import EXAMPLE

Plain: TypeAlias = dict[str, Any]
Change: TypeAlias = Callable[[Plain], object]
PASSES = "passes"


def put(value: Any, *path: Any) -> Change:
    """Set what stands at `path`."""

    def change(plain: Any) -> None:
        for key in path[:-1]:
            plain = plain[key]
        plain[path[-1]] = value

    return change


def move(index: int, start: int, end: int) -> Change:
    """Let a block hold other tokens, with shapes to match."""

    def change(plain: Plain) -> None:
        block = plain["blocks"][index]
        block["start"], block["end"] = start, end
        for name in ("first_shape", "second_shape"):
            block[name][-2] = end - start

    return change


def drop(name: str, *indices: int) -> Change:
    """Remove entries of a list."""

    def change(plain: Plain) -> None:
        plain[name] = [one for index, one in enumerate(plain[name]) if index not in indices]

    return change


def repeat(name: str, index: int, **changes: Any) -> Change:
    """Append a changed copy of an entry."""
    return lambda plain: plain[name].append({**copy.deepcopy(plain[name][index]), **changes})


def all_of(*changes: Change) -> Change:
    def change(plain: Plain) -> None:
        for one in changes:
            one(plain)

    return change


def swap(name: str, one: int, other: int) -> Change:
    def change(plain: Plain) -> None:
        entries = plain[name]
        entries[one], entries[other] = entries[other], entries[one]

    return change


def segments(*parts: tuple[str, int, int]) -> Change:
    return put(
        [{"id": name, "layers": {"start": a, "end": b}} for name, a, b in parts], "state_segments"
    )


def offset(index: int, value: int) -> Change:
    return put(value, "layer_prefix_offsets", index)


# In both manifests blocks 0, 1 are of layer 5, 2 of layer 6, 3, 4 of layer 7, 5, 6 of layer 8;
# tensors 0 to 2 are of layer 8 (convolution, pending, pooled), 3 recurrent and 4 delta of layer 9.
MUTATIONS: dict[str, tuple[Change, str]] = {
    # prompt_cache 8, row by row
    "schema 7": (put(7, "schema_version"), "UnsupportedSchema 7"),
    "no content": (put("", "prefix_content_fingerprint"), "global_dimensions"),
    "blank content": (put("  ", "prefix_content_fingerprint"), PASSES),
    "no family": (put("", "model_family"), PASSES),
    "uppercase prefix": (
        lambda plain: plain.update(prefix_sha256=plain["prefix_sha256"].upper()),
        "global_dimensions",
    ),
    "a layer leads": (offset(0, 1), "frontier"),
    "a layer lags the start": (offset(4, -7), "frontier"),
    "frontier 0, tensors kept": (offset(4, -6), PASSES),
    "frontier 0, tensors removed": (all_of(offset(4, -6), drop("state_tensors", 3, 4)), PASSES),
    "frontier 0, blocks removed": (all_of(offset(0, -6), drop("blocks", 0, 1)), PASSES),
    "rank beyond its axis": (put([2, 2], "topology", "stage"), "topology_stage"),
    "empty axis": (put([0, 0], "topology", "stage"), "topology_stage"),
    "no rank": (put(None, "blocks", 0, "rank"), "block_rank"),
    "gap of segments": (segments(("a", 0, 3), ("b", 4, 5)), "segments_not_partition"),
    "segments end early": (segments(("a", 0, 4)), "segments_incomplete"),
    "one name twice": (segments(("a", 0, 4), ("a", 4, 5)), "segment_id_duplicate"),
    "layer without blocks": (drop("blocks", 2), "coverage_missing"),
    "window not covered": (move(2, 5, 6), "coverage_start"),
    "more history": (move(2, 3, 6), PASSES),
    "all history": (move(2, 0, 6), PASSES),
    "ends early": (move(2, 3, 5), "coverage_end"),
    "start missing": (drop("blocks", 0), "coverage_start"),
    "blocks swapped": (swap("blocks", 0, 1), "block_order"),
    "hole": (move(1, 5, 6), "coverage_gap"),
    "overlap": (move(1, 3, 6), "coverage_gap"),
    "block of a stateless layer": (
        repeat("blocks", 6, global_layer=9, end=5),
        "block_stateless_layer",
    ),
    "key-only values of full width": (
        lambda plain: plain["blocks"][5].update(second_shape=plain["blocks"][5]["first_shape"]),
        "block_geometry",
    ),
    "two dtypes": (put("Float32", "blocks", 0, "second_dtype"), "block_arrays"),
    "both dtypes odd": (
        lambda plain: plain["blocks"][0].update(first_dtype="Int8", second_dtype="Int8"),
        PASSES,
    ),
    "other block size": (put(3, "block_size_tokens"), PASSES),
    "sinks": (put(99, "sink_tokens"), PASSES),
    "absolute shard": (put("/x", "blocks", 0, "shard"), "block_fields"),
    "empty part": (put("a//b", "blocks", 0, "shard"), "block_fields"),
    "dot part": (put("a/./b", "blocks", 0, "shard"), "block_fields"),
    "backslash": (put("a\\b", "blocks", 0, "shard"), "block_fields"),
    "shard in a folder": (put("sub/a.safetensors", "blocks", 0, "shard"), PASSES),
    "optional tensor removed": (drop("state_tensors", 4), PASSES),
    "required tensor removed": (drop("state_tensors", 3), "state_count"),
    "tensors reversed": (lambda plain: plain["state_tensors"].reverse(), "state_entry"),
    "scalar without axis": (put([], "state_tensors", 4, "shape"), "state_entry"),
    "tensor twice": (repeat("state_tensors", 0), "state_duplicate"),
    "recurrent in half": (put("Float16", "state_tensors", 3, "dtype"), "state_entry"),
    # prompt_cache 7.1, what the table does not have
    "block size 0": (put(0, "block_size_tokens"), "global_dimensions"),
    "no layer": (put(0, "layer_count"), "global_dimensions"),
    "owns beyond the model": (put(9, "layer_count"), "global_dimensions"),
    "owns nothing": (put(5, "global_layer_end"), "global_dimensions"),
    "ends before it starts": (put(4, "global_layer_end"), "global_dimensions"),
    "layout short": (lambda plain: plain["layer_layout"].pop(), "global_dimensions"),
    "offsets short": (lambda plain: plain["layer_prefix_offsets"].pop(), "global_dimensions"),
    "batch 0": (put(0, "batch_size"), "global_dimensions"),
    "batch above i32": (put(I32_MAX + 1, "batch_size"), "global_dimensions"),
    "no token": (put(0, "total_prefix_tokens"), "global_dimensions"),
    "prefix hash with prefix": (put("sha256:" + "0" * 57, "prefix_sha256"), "global_dimensions"),
    "before topology": (
        all_of(put(0, "batch_size"), put([0, 0], "topology", "stage")),
        "global_dimensions",
    ),
    "topology before segments": (
        all_of(segments(), put([0, 0], "topology", "shard")),
        "topology_shard",
    ),
    "segments before frontier": (all_of(segments(), offset(0, 1)), "segments_missing"),
    "blank segment": (segments((" ", 0, 5)), "segment_id_empty"),
    "frontiers before policies": (
        all_of(offset(4, 1), put(I32_MAX + 1, "layer_layout", 0, "key_value", "head_dim")),
        "frontier",
    ),
    "policy of a layer": (
        put(I32_MAX + 1, "layer_layout", 0, "key_value", "head_dim"),
        "layer_policy",
    ),
    "layer without its tensors": (
        put([], "layer_layout", 4, "fixed_state", "tensors"),
        "layer_policy",
    ),
    # 7.3
    "layer before the owned": (put(4, "blocks", 0, "global_layer"), "block_layer_range"),
    "layer after the owned": (put(10, "blocks", 6, "global_layer"), "block_layer_range"),
    "layer far away": (put(U64_MAX, "blocks", 0, "global_layer"), "block_layer_range"),
    "negative start": (move(0, -1, 4), "block_fields"),
    "empty block": (move(0, 4, 4), "block_fields"),
    "beyond the frontier": (move(1, 4, 7), "block_fields"),
    "no bytes": (put(0, "blocks", 0, "logical_bytes"), "block_fields"),
    "no first shape": (put([], "blocks", 0, "first_shape"), "block_fields"),
    "no second shape": (put([], "blocks", 0, "second_shape"), "block_fields"),
    "no digest": (put("0" * 63, "blocks", 0, "payload_sha256"), "block_fields"),
    "digest in uppercase": (put("A" * 64, "blocks", 0, "payload_sha256"), "block_fields"),
    "block twice": (
        lambda plain: plain["blocks"].insert(1, copy.deepcopy(plain["blocks"][0])),
        "block_order",
    ),
    "layers swapped": (swap("blocks", 1, 2), "block_order"),
    "representation": (
        put("compressed_latent_rotary", "blocks", 0, "representation"),
        "block_geometry",
    ),
    "first shape": (put(9, "blocks", 0, "first_shape", 3), "block_geometry"),
    "batch of a shape": (put(2, "blocks", 0, "first_shape", 0), "block_geometry"),
    "tokens of a shape": (put(3, "blocks", 3, "second_shape", 1), "block_geometry"),
    "geometry before rank": (
        all_of(put(None, "blocks", 0, "rank"), put(9, "blocks", 0, "first_shape", 3)),
        "block_geometry",
    ),
    "other rank": (put(0, "blocks", 0, "rank", "stage_rank"), "block_rank"),
    "rank before names": (
        all_of(put(None, "blocks", 0, "rank"), put("k", "blocks", 0, "first_array")),
        "block_rank",
    ),
    "first name": (put("key", "blocks", 0, "first_array"), "block_arrays"),
    "second name": (put("values", "blocks", 3, "second_array"), "block_arrays"),
    # 7.4
    "tensor of another layer": (put(5, "state_tensors", 0, "owner", "layer"), "state_entry"),
    "unknown owner added": (repeat("state_tensors", 0, owner={"layer": 5}), "state_count"),
    "unknown role added": (repeat("state_tensors", 0, role="recurrent"), "state_count"),
    "optional tensor of another role": (
        put("prefix_embedding", "state_tensors", 4, "role"),
        "state_count",
    ),
    "pending tensor removed": (drop("state_tensors", 1), "state_count"),
    "duplicate before count": (
        all_of(drop("state_tensors", 3), repeat("state_tensors", 0)),
        "state_duplicate",
    ),
    "shape of a tensor": (put([1, 2, 2, 1], "state_tensors", 3, "shape"), "state_entry"),
    "array name": (put("x", "state_tensors", 0, "array"), "state_entry"),
    "tensor without bytes": (put(0, "state_tensors", 0, "logical_bytes"), "state_entry"),
    "tensor digest": (put("", "state_tensors", 0, "payload_sha256"), "state_entry"),
    "tensor shard": (put("..", "state_tensors", 0, "shard"), "state_entry"),
    "an integer of another kind": (put("Uint32", "state_tensors", 4, "dtype"), "state_entry"),
    # 7.5
    "hole in a latent": (drop("blocks", 3), "coverage_start"),
    "latent ends early": (drop("blocks", 4), "coverage_end"),
    "whole layer missing": (drop("blocks", 5, 6), "coverage_missing"),
    "blocks before tensors": (
        all_of(put(None, "blocks", 0, "rank"), drop("state_tensors", 3)),
        "block_rank",
    ),
    "tensors before coverage": (all_of(drop("blocks", 2), drop("state_tensors", 3)), "state_count"),
}


def outcome(plain: Plain) -> str:
    manifest = PromptCacheManifest.from_json(json.dumps(plain))
    try:
        manifest.validate()
    except PromptCacheError.UnsupportedSchema as error:
        return f"UnsupportedSchema {error.version}"
    except PromptCacheError.Malformed as error:
        return error.code
    return PASSES


@pytest.mark.parametrize("base", ["own", "example"])
def test_mutations(base: str) -> None:
    """prompt_cache 7.1, 7.3 to 7.6 and the table of 8, on our manifest and on the contract's"""
    if base == "example" and not EXAMPLE.exists():
        pytest.skip("the contract's example manifest is not beside this checkout")
    text = hybrid().to_json() if base == "own" else EXAMPLE.read_bytes()
    found = {}
    for name, (change, _) in MUTATIONS.items():
        plain = json.loads(text)
        before = json.dumps(plain)
        change(plain)
        assert json.dumps(plain) != before, name
        found[name] = outcome(plain)
    assert found == {name: expected for name, (_, expected) in MUTATIONS.items()}


SAFE = ("a/b.safetensors", "a", "...", ".a", "a.", "a/..b", "ä/b c", "a\nb", "..a/.b", "-", "\x00")
UNSAFE = (
    *("a//b", "a/", "./a", "a/./b", "a\\b", "", "/", "/x", ".", "..", "../x", "a/..", "a/../b"),
    *("//", "a/.", "\\", "a/b/", "a/b//c", "..\\x"),
)


def naive_safe(text: str) -> bool:
    """prompt_cache 7.6, word by word"""
    parts = text.split("/")
    ordinary = all(part not in ("", ".", "..") for part in parts)
    return bool(text) and not text.startswith("/") and "\\" not in text and ordinary


@sample("a/..\n")
@sample("..\n")
@given(st.text("./a\\\n", max_size=9))
def test_safe_shard_paths(text: str) -> None:
    """prompt_cache 7.6"""
    assert [path for path in SAFE if not is_safe_shard_path(path)] == []
    assert [path for path in UNSAFE if is_safe_shard_path(path)] == []
    assert bool(is_safe_shard_path(text)) is naive_safe(text)


# One layer, made larger ---------------------------------------------------------------------------


def stored(
    window: int | None, total: int, spans: list[tuple[int, int]], lag: int = 0
) -> PromptCacheManifest:
    """A manifest of one layer that holds these spans of tokens."""
    base = minimal()
    block = base.blocks[0]
    attention = AttentionPolicy.from_sliding_window(window)
    blocks = [
        msgspec.structs.replace(
            block,
            start=start,
            end=end,
            first_shape=(1, 1, end - start, 2),
            second_shape=(1, 1, end - start, 2),
        )
        for start, end in spans
    ]
    return msgspec.structs.replace(
        base,
        total_prefix_tokens=total,
        layer_prefix_offsets=(-lag,),
        layer_layout=LayerSchedule([LayerCachePolicy.key_value(attention, 1, 2)]),
        blocks=tuple(blocks),
    )


def code(manifest: PromptCacheManifest) -> str:
    try:
        manifest.validate()
    except PromptCacheError.Malformed as error:
        return error.code
    return PASSES


def test_the_window_of_one_token_needs_a_block() -> None:
    """prompt_cache 7.5"""
    assert code(stored(1, 6, [])) == "coverage_missing"
    assert code(stored(1, 6, [(5, 6)])) == PASSES
    assert code(stored(1, 6, [(0, 6)])) == PASSES
    assert code(stored(2, 6, [(5, 6)])) == PASSES
    assert code(stored(3, 6, [(5, 6)])) == "coverage_start"
    assert code(stored(I32_MAX, 6, [(0, 6)])) == PASSES
    assert code(stored(I32_MAX, 6, [(1, 6)])) == "coverage_start"


@given(
    st.none() | st.integers(1, 9),
    st.integers(1, 8),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4),
)
def test_coverage_means_that_no_needed_token_is_missing(
    window: int | None, total: int, lag: int, spans: list[tuple[int, int]]
) -> None:
    """prompt_cache 7.5, against sets of tokens"""
    spans = sorted(span for span in set(spans) if span[0] < span[1])
    frontier = total - lag
    found = code(stored(window, total, spans, lag))
    if frontier < 0:
        assert found == "frontier"
        return
    tokens = [token for start, end in spans for token in range(start, end)]
    first_seen = 0 if window is None else max(0, frontier - window + 1)
    needed = set(range(first_seen, frontier))
    contiguous = tokens == list(range(tokens[0], frontier)) if tokens else frontier == 0
    good = contiguous and needed <= set(tokens)
    assert (found == PASSES) is good


def test_a_block_of_more_than_i32_tokens() -> None:
    """prompt_cache 7.3, step 4"""
    total = I32_MAX + 2
    whole = stored(None, total, [(0, 4)])
    block = msgspec.structs.replace(whole.blocks[0], end=total)
    assert code(msgspec.structs.replace(whole, blocks=(block,))) == "block_token_count"
    half = msgspec.structs.replace(block, end=I32_MAX, first_shape=(1, 1, I32_MAX, 2))
    half = msgspec.structs.replace(half, second_shape=half.first_shape)
    rest = msgspec.structs.replace(
        block, start=I32_MAX, first_shape=(1, 1, 2, 2), second_shape=(1, 1, 2, 2)
    )
    assert code(msgspec.structs.replace(whole, blocks=(half, rest))) == PASSES


def test_a_shape_that_does_not_resolve_is_a_policy_error() -> None:
    """prompt_cache 7.4, step 4"""
    base = hybrid()
    layout = list(base.layer_layout)
    recurrent, delta = layout[4].fixed_state()
    wide = msgspec.structs.replace(recurrent.shape[1], value=I32_MAX + 1)
    tensor = msgspec.structs.replace(recurrent, shape=(recurrent.shape[0], wide))
    layout[4] = LayerCachePolicy.FixedState((tensor, delta))
    with pytest.raises(PromptCacheError) as caught:
        msgspec.structs.replace(base, layer_layout=LayerSchedule(layout)).validate()
    source = CachePolicyError.Invalid("resolved_dimension_range")
    assert caught.value == PromptCacheError.Policy(source)


def test_presence_rules_force_presence_only() -> None:
    """prompt_cache 7.4: a listed tensor is accepted though its condition is false."""
    base = hybrid()
    layout = list(base.layer_layout)
    recurrent, delta = layout[4].fixed_state()
    for presence in (
        StateTensorPresence.PrefixAtLeast(100),
        StateTensorPresence.PrefixRemainderNonZero(5),
        StateTensorPresence.Optional(),
    ):
        relaxed = msgspec.structs.replace(recurrent, presence=presence)
        layout[4] = LayerCachePolicy.FixedState((relaxed, delta))
        changed = msgspec.structs.replace(base, layer_layout=LayerSchedule(layout))
        assert code(changed) == PASSES
        without = msgspec.structs.replace(changed, state_tensors=base.state_tensors[:3])
        assert code(without) == PASSES
    strict = msgspec.structs.replace(recurrent, presence=StateTensorPresence.PrefixAtLeast(5))
    layout[4] = LayerCachePolicy.FixedState((strict, delta))
    changed = msgspec.structs.replace(base, layer_layout=LayerSchedule(layout))
    without = msgspec.structs.replace(changed, state_tensors=base.state_tensors[:3])
    assert (code(changed), code(without)) == (PASSES, "state_count")


def test_many_blocks_are_one_pass() -> None:
    """A longer manifest is decoded and validated; a fault in its last block is still found."""
    count = 5000
    spans = [(4 * n, 4 * n + 4) for n in range(count)]
    manifest = PromptCacheManifest.from_json(stored(None, 4 * count, spans).to_json())
    assert len(manifest.blocks) == count
    assert code(manifest) == PASSES
    last: PromptCacheBlock = msgspec.structs.replace(manifest.blocks[-1], second_dtype="Float16")
    spoiled = msgspec.structs.replace(manifest, blocks=(*manifest.blocks[:-1], last))
    with pytest.raises(PromptCacheError.Malformed, match=f"block {count - 1}, "):
        spoiled.validate()
