"""Topology and segments (prompt_cache 3 and 4)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import U64_MAX
from shmcache.errors import PromptCacheError
from shmcache.policy.identity import CacheRankIdentity
from shmcache.policy.topology import (
    LayerRange,
    PromptCacheStateSegment,
    PromptCacheTopology,
    validate_segments,
)
from tests.policy.samples import topologies

Malformed, Incompatible = PromptCacheError.Malformed, PromptCacheError.Incompatible
AXES = ("stage", "shard", "addressable")


def test_the_default_topology() -> None:
    """prompt_cache 3"""
    default = PromptCacheTopology.default()
    assert default == PromptCacheTopology.new(None, None, None, True)
    default.validate()
    assert default.cache_rank_identity() is None


def test_reading_a_topology() -> None:
    """prompt_cache 3: the axes are optional, the boolean is not; a pair is (size, rank)."""
    convert = msgspec.convert
    only = {"addressable_state_replicated": False}
    expected = PromptCacheTopology.new(None, None, None, False)
    assert convert(only, PromptCacheTopology) == expected
    assert convert({**only, "stage": [2, 1]}, PromptCacheTopology).stage == (2, 1)
    for wrong in (
        {},
        {"addressable_state_replicated": None},
        {"addressable_state_replicated": 1},
        {**only, "stage": [2]},
        {**only, "stage": [2, 1, 0]},
        {**only, "stage": {"size": 2}},
        {**only, "shard": [2, -1]},
    ):
        with pytest.raises(msgspec.ValidationError):
            convert(wrong, PromptCacheTopology)
    # Refused by the schema check that old manifests meet first; here a key is missing.
    with pytest.raises(msgspec.ValidationError, match="addressable_state_replicated"):
        convert({"pipeline": None, "tensor_parallel": None}, PromptCacheTopology)


def test_a_rank_lies_in_its_axis() -> None:
    """prompt_cache 3: axes in order."""
    good: dict[str, Any] = dict.fromkeys(AXES, (2, 1))
    PromptCacheTopology.new(**good, addressable_state_replicated=True)
    for position, axis in enumerate(AXES):
        for pair in ((0, 0), (2, 2), (1, U64_MAX)):
            pairs = {**good, axis: pair, **dict.fromkeys(AXES[position + 1 :], (0, 0))}
            bare = PromptCacheTopology(**pairs, addressable_state_replicated=True)
            for check in (
                bare.validate,
                lambda pairs=pairs: PromptCacheTopology.new(
                    **pairs, addressable_state_replicated=True
                ),
            ):
                with pytest.raises(PromptCacheError) as caught:
                    check()
                assert caught.value == Malformed(f"topology_{axis}")


@given(topologies)
def test_the_rank_identity(topology: PromptCacheTopology) -> None:
    """prompt_cache 3: an axis of one rank counts as present."""
    ranks = [pair and pair[1] for pair in (topology.stage, topology.shard, topology.addressable)]
    absent = all(rank is None for rank in ranks)
    assert topology.cache_rank_identity() == (None if absent else CacheRankIdentity.new(*ranks))


def test_an_axis_of_size_one_is_an_axis() -> None:
    """prompt_cache 3"""
    one = PromptCacheTopology.new(None, (1, 0), None, True)
    assert one.cache_rank_identity() == CacheRankIdentity(shard_rank=0)


def test_ranges() -> None:
    """prompt_cache 4"""
    assert LayerRange(start=2, end=5).len() == len(LayerRange(start=2, end=5)) == 3
    assert LayerRange(start=5, end=2).len() == 0
    assert LayerRange(start=0, end=U64_MAX).len() == U64_MAX
    plain: dict[str, int] = {"start": 0, "end": 4}
    assert msgspec.convert(plain, LayerRange) == LayerRange(start=0, end=4)
    for wrong in ({"start": 0}, {"end": 4}, {**plain, "step": 1}, [0, 4]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, LayerRange)


def test_new_segments() -> None:
    """prompt_cache 4"""
    made = PromptCacheStateSegment.new(" decoder ", range(4))
    assert made == PromptCacheStateSegment(id=" decoder ", layers=LayerRange(start=0, end=4))
    assert PromptCacheStateSegment.new(" decoder ", LayerRange(start=0, end=4)) == made
    assert msgspec.to_builtins(made) == {"id": " decoder ", "layers": {"start": 0, "end": 4}}
    for name, layers, code in (
        ("", range(4), "segment_id_empty"),
        (" \t\n\u2003", range(2, 2), "segment_id_empty"),
        ("a", range(2, 2), "segment_range_empty"),
        ("a", LayerRange(start=3, end=2), "segment_range_empty"),
    ):
        with pytest.raises(PromptCacheError) as caught:
            PromptCacheStateSegment.new(name, layers)
        assert caught.value == Malformed(code)
    with pytest.raises(ValueError, match="step"):
        PromptCacheStateSegment.new("a", range(0, 4, 2))
    with pytest.raises(ValueError, match="start"):
        PromptCacheStateSegment.new("a", range(-1, 4))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"id": "a", "layers": {"start": 0, "end": 1, "x": 1}}, type(made))
    decoded = msgspec.convert({"id": "", "layers": {"start": 1, "end": 0}}, type(made))
    assert decoded.id == ""  # decoding runs no rule


def segments(*parts: tuple[str, int, int]) -> list[PromptCacheStateSegment]:
    return [
        PromptCacheStateSegment(id=name, layers=LayerRange(start=start, end=end))
        for name, start, end in parts
    ]


def test_segments_partition_the_owned_layers() -> None:
    """prompt_cache 4.1: in order, by caller's kind"""
    validate_segments(segments(("a", 0, 4), ("b", 4, 6)), 6, Malformed)
    validate_segments(segments((" ", 0, 6))[:0] + segments(("x", 0, 6)), 6, Malformed)
    for parts, code in (
        ((), "segments_missing"),
        ((("", 0, 6),), "segment_id_empty"),
        ((("a", 0, 2), (" ", 9, 1)), "segment_id_empty"),
        ((("a", 0, 2), ("a", 9, 1)), "segment_id_duplicate"),
        ((("a", 1, 6),), "segments_not_partition"),
        ((("a", 0, 0),), "segments_not_partition"),
        ((("a", 0, 7),), "segments_not_partition"),
        ((("a", 0, 3), ("b", 4, 6)), "segments_not_partition"),
        ((("a", 0, 3), ("b", 2, 6)), "segments_not_partition"),
        ((("a", 0, 3), ("b", 3, 3), ("c", 3, 6)), "segments_not_partition"),
        ((("a", 0, 4),), "segments_incomplete"),
    ):
        for kind in (Malformed, Incompatible):
            with pytest.raises(PromptCacheError) as caught:
                validate_segments(segments(*parts), 6, kind)
            assert caught.value == kind(code)


@given(
    st.lists(st.tuples(st.sampled_from("abc "), st.integers(0, 4), st.integers(0, 4)), max_size=4),
    st.integers(1, 4),
)
def test_a_partition_covers_each_layer_once(parts: list[Any], owned: int) -> None:
    """prompt_cache 4.1, against the meaning of the words"""
    covered = [layer for _, start, end in parts for layer in range(start, end)]
    names = [name.strip() for name, _, _ in parts]
    good = (
        covered == list(range(owned))
        and all(start < end for _, start, end in parts)
        and all(names)
        and len(set(names)) == len(names)
    )
    try:
        validate_segments(segments(*parts), owned, Malformed)
    except PromptCacheError:
        assert not good
    else:
        assert good
