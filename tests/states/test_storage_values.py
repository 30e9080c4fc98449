"""Phases, kinds and keys: equality, the wire, hostile input (S7, S8)."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmcache.bounds import I64_MAX, I64_MIN, U64_MAX
from shmcache.states.storage import CacheIoOperationKey, CacheIoOperationKind, CacheStoragePhase
from tests.states.blocks import LATENT, block, ids, rank
from tests.states.storages import FOREIGN, WRITE, X, read, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import Enum

EXTREME = CacheIoOperationKey(
    U64_MAX,
    block(
        U64_MAX,
        I64_MIN,
        I64_MAX,
        session=U64_MAX,
        representation=LATENT,
        rank=rank(U64_MAX, None, 0),
    ),
    WRITE,
)
keys = st.builds(
    CacheIoOperationKey, st.integers(0, U64_MAX), ids, st.sampled_from(CacheIoOperationKind)
)


@pytest.mark.parametrize("other", [write(13), write(12, FOREIGN), read(12)])
def test_s7_each_field_alone_makes_another_key(other: CacheIoOperationKey) -> None:
    key, twin = write(12), write(12)
    assert key == twin
    assert hash(key) == hash(twin)
    assert key != other
    assert len({key, twin, other}) == 2


@example(EXTREME)
@given(keys)
def test_s8_a_key_comes_back(key: CacheIoOperationKey) -> None:
    assert msgspec.json.decode(msgspec.json.encode(key), type=CacheIoOperationKey) == key
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(key), type=CacheIoOperationKey) == key
    for twin in (copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert twin == key
        assert hash(twin) == hash(key)


@pytest.mark.parametrize("member", [*CacheStoragePhase, *CacheIoOperationKind])
def test_s8_phases_and_kinds_come_back(member: Enum) -> None:
    assert msgspec.json.decode(msgspec.json.encode(member), type=type(member)) is member
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(member), type=type(member)) is member
    assert member.value == member.name.lower()


def test_names_on_the_wire() -> None:
    plain = msgspec.to_builtins(write(12))
    assert list(plain) == ["generation", "id", "kind"]
    assert (plain["generation"], plain["kind"]) == (12, "write")
    assert plain["id"] == msgspec.to_builtins(X)
    assert [phase.value for phase in CacheStoragePhase] == [
        "device",
        "demoting_to_host",
        "host_unbacked",
        "host_writing",
        "host_backed",
        "disk_ready",
        "disk_reading",
    ]


def test_the_tier_of_each_phase() -> None:
    """A block on its way counts where it was."""
    tiers = [phase.tier.value for phase in CacheStoragePhase]
    assert tiers == ["device", "device", "host", "host", "host", "disk", "disk"]


BAD_FIELDS = [
    ("generation", -1),
    ("generation", U64_MAX + 1),
    ("generation", True),
    ("generation", 1.0),
    ("generation", None),
    ("id", None),
    ("id", "X"),
    ("kind", None),
    ("kind", "write"),
    ("kind", CacheStoragePhase.DEVICE),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_key_checks_its_domain(field: str, value: Any) -> None:
    fields = {"generation": 1, "id": X, "kind": WRITE, field: value}
    makers: tuple[Callable[[], object], ...] = (
        lambda: CacheIoOperationKey(**fields),
        lambda: msgspec.structs.replace(write(1), **{field: value}),
    )
    for make in makers:
        with pytest.raises((TypeError, ValueError), match=field):
            make()


def test_a_key_is_immutable() -> None:
    with pytest.raises(AttributeError):
        write(1).generation = 2  # type: ignore[misc]


GOOD = msgspec.json.encode(write(12)).decode()


@pytest.mark.parametrize(
    ("part", "bad"),
    [
        ("12", "-1"),
        ("12", "18446744073709551616"),
        ("12", "1" * 5000),
        ("12", "12.0"),
        ("12", "true"),
        ("12", "null"),
        ("12", "NaN"),
        ("12", '"12"'),
        ('"write"', '"append"'),
        ('"write"', "1"),
        ('"key_value"', '"keys"'),
        ('"generation"', '"Generation"'),
        ('"start":64', '"start":9223372036854775808'),
        ('"rank":null', '"rank":{"stage_rank":-1}'),
        ('"rank":null', '"rank":' + "[" * 1000 + "]" * 1000),
        ("}", ""),
    ],
)
def test_hostile_json_of_a_key_is_a_decode_error(part: str, bad: str) -> None:
    text = GOOD.replace(part, bad)
    assert text != GOOD
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text, type=CacheIoOperationKey)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_bytes_are_a_decode_error(data: bytes) -> None:
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        with pytest.raises(msgspec.DecodeError):
            decode(data, type=CacheIoOperationKey)


def test_unknown_keys_are_ignored() -> None:
    text = GOOD[:-1] + ',"colour":[1,{"x":null}]}'
    assert msgspec.json.decode(text, type=CacheIoOperationKey) == write(12)
