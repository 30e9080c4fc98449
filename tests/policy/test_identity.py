"""Block identity: wire form, equality, order (policy 3 and 1.4)."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import I64_MAX, I64_MIN, U64_MAX
from shmcache.policy.identity import (
    CacheBlockId,
    CacheRankIdentity,
    CacheRepresentation,
    CacheTier,
)
from tests.policy.samples import block_ids, ranks

ID = CacheBlockId(
    session_id=3,
    global_layer=0,
    representation=CacheRepresentation.KEY_VALUE,
    start=0,
    end=64,
)


def test_spellings() -> None:
    """policy 3.1, 3.4"""
    assert [one.value for one in CacheRepresentation] == ["key_value", "compressed_latent_rotary"]
    assert [one.name for one in CacheRepresentation] == ["KEY_VALUE", "COMPRESSED_LATENT_ROTARY"]
    assert [(one.name, one.value) for one in CacheTier] == [
        ("DEVICE", "device"),
        ("HOST", "host"),
        ("DISK", "disk"),
    ]


def test_the_block_id_of_the_contract() -> None:
    """policy 3.3"""
    text = (
        b'{"session_id":3,"global_layer":0,"representation":"key_value","start":0,"end":64,'
        b'"rank":null}'
    )
    assert msgspec.json.encode(ID) == text
    assert msgspec.json.decode(text, type=CacheBlockId) == ID


def test_reading_ignores_unknown_keys_and_fills_optional_ones() -> None:
    """policy 1.3"""
    plain: dict[str, Any] = msgspec.to_builtins(ID)
    del plain["rank"]
    assert msgspec.convert({**plain, "colour": 1}, CacheBlockId) == ID
    for name in plain:
        short = {key: value for key, value in plain.items() if key != name}
        with pytest.raises(msgspec.ValidationError, match=f"missing required field `{name}`"):
            msgspec.convert(short, CacheBlockId)
    assert msgspec.convert({}, CacheRankIdentity) == CacheRankIdentity()


def test_no_invariant_between_fields() -> None:
    """policy 3.3: start < end is checked by users."""
    odd = msgspec.structs.replace(ID, start=I64_MAX, end=I64_MIN, session_id=U64_MAX)
    assert (odd.start, odd.end) == (I64_MAX, I64_MIN)


def test_ranks() -> None:
    """policy 3.2: three None are a value, and not the absence of one."""
    assert CacheRankIdentity.new() == CacheRankIdentity.new(None, None, None)
    assert CacheRankIdentity.new(1, shard_rank=2).stage_rank == 1
    plain = msgspec.to_builtins(CacheRankIdentity.new(1, None, 3))
    assert plain == {"stage_rank": 1, "shard_rank": None, "addressable_rank": 3}
    assert list(plain) == ["stage_rank", "shard_rank", "addressable_rank"]
    with_rank = msgspec.structs.replace(ID, rank=CacheRankIdentity())
    assert with_rank != ID
    assert len({with_rank, ID}) == 2
    old: Any = {"pipeline_rank": 1, "tensor_parallel_rank": 2, "expert_parallel_rank": 3}
    assert msgspec.convert(old, CacheRankIdentity) == CacheRankIdentity()  # neither read nor known


def test_the_order_of_ids() -> None:
    """policy 3.3: by session, layer, representation, start, end, rank; None first."""
    latent = CacheRepresentation.COMPRESSED_LATENT_ROTARY
    steps: list[dict[str, Any]] = [
        {},
        {"rank": CacheRankIdentity()},
        {"rank": CacheRankIdentity.new(None, None, 0)},
        {"rank": CacheRankIdentity.new(None, 0)},
        {"rank": CacheRankIdentity.new(0)},
        {"rank": CacheRankIdentity.new(0, None, 9)},
        {"rank": CacheRankIdentity.new(0, 0)},
        {"rank": CacheRankIdentity.new(1)},
        {"end": 65},
        {"start": 1, "end": -5},
        {"representation": latent, "start": -9},
        {"global_layer": 1},
        {"session_id": 4},
    ]
    ordered = [msgspec.structs.replace(ID, **step) for step in steps]
    for one, other in itertools.combinations(ordered, 2):
        assert one < other
        assert one <= other
        assert other > one
        assert other >= one
        assert not other < one
        assert one != other
    assert sorted(ordered[1::2] + ordered[::2]) == ordered


def naive_key(value: CacheBlockId | CacheRankIdentity) -> list[Any]:
    """The order as the contract's words have it, by another way: None is below every number."""
    key: list[Any] = []
    for name in value.__struct_fields__:
        part = getattr(value, name)
        if isinstance(part, CacheRepresentation):
            key.append(list(CacheRepresentation).index(part))
        elif isinstance(part, CacheRankIdentity):
            key.append([1, naive_key(part)])
        elif name == "rank":
            key.append([0])
        else:
            key.append(I64_MIN - 1 if part is None else part)
    return key


@given(st.lists(block_ids, max_size=6) | st.lists(ranks, max_size=6))
def test_sorting_is_the_order_of_a_naive_key(values: list[Any]) -> None:
    assert sorted(values) == sorted(values, key=naive_key)
    for one, other in itertools.product(values, values):
        assert (one == other) == (not one < other and not other < one)
        assert one != other or hash(one) == hash(other)


def test_only_a_family_compares() -> None:
    values: list[Any] = [ID, CacheRankIdentity(), CacheRepresentation.KEY_VALUE, 3, None]
    for one, other in itertools.permutations(values, 2):
        if isinstance(one, int) and isinstance(other, int):
            continue
        with pytest.raises(TypeError, match="not supported between instances"):
            one < other  # noqa: B015
    assert CacheRepresentation.KEY_VALUE < CacheRepresentation.COMPRESSED_LATENT_ROTARY
