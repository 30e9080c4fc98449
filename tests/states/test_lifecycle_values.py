"""Arguments outside their domain, and the values of the lifecycle: tails and policies."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from shmcache.bounds import I64_MAX, I64_MIN, U64_MAX
from shmcache.states.lifecycle import CacheBlockLifecycle, CacheEvictionPolicy, MutableCacheTail
from tests.states.test_lifecycle import LRU, TAIL, A, B, lifecycle_of, state

if TYPE_CHECKING:
    from collections.abc import Callable


ANY: Any = object()
U64 = (-1, U64_MAX + 1)
CALLS: tuple[tuple[Callable[[CacheBlockLifecycle, Any], object], tuple[Any, ...]], ...] = (
    (lambda x, bad: x.insert(bad, False), (None, "A", ANY, [])),
    (lambda x, bad: x.insert(B, bad), (None, 0, 1, "yes")),
    (lambda x, bad: x.remove(bad), (None, "A", [])),
    (lambda x, bad: x.acquire(bad), (None, "A", [])),
    (lambda x, bad: x.release(bad), (None, "A", [])),
    (lambda x, bad: x.lease_count(bad), (None, "A")),
    (lambda x, bad: x.is_leased(bad), (None, "A")),
    (lambda x, bad: x.is_protected_prefix(bad), (None, "A")),
    (lambda x, bad: x.replace([(bad, 0)], None, 0, TAIL), (None, "A", [])),
    (lambda x, bad: x.replace([(A, bad)], None, 0, TAIL), (None, True, 0.0, *U64)),
    (lambda x, bad: x.replace([], bad, 0, TAIL), (A, ("A", False), (B, 1), (B,))),
    (lambda x, bad: x.replace([], None, bad, TAIL), (None, True, 0.0, *U64)),
    (lambda x, bad: x.replace([], None, 0, bad), (None, (24, 3))),
    (lambda x, bad: x.set_tail(bad, TAIL), (None, False, "0", *U64)),
    (lambda x, bad: x.set_tail(0, bad), (None, (24, 3))),
    (lambda x, bad: x.restore_tail(bad, None), (None, False, "0", *U64)),
    (lambda x, bad: x.restore_tail(0, bad), (0, (24, 3))),
    (lambda x, bad: x.tail(bad), (None, False, "0", *U64)),
    (lambda x, bad: x.eviction_candidate(bad, None, 0, LRU), (None, [None], ["A"], 7)),
    (lambda x, bad: x.eviction_candidate([A], bad, 0, LRU), (7, "A")),
    (lambda x, bad: x.eviction_candidate([A], None, bad, LRU), (None, True, *U64)),
    (lambda x, bad: x.eviction_candidate([A], None, 0, bad), (None, "least_recently_used")),
    (lambda x, bad: x.recent_protection_counts(bad, 0), (None, [None], ["A"], 7)),
    (lambda x, bad: x.recent_protection_counts([A], bad), (None, True, *U64)),
)


@pytest.mark.parametrize(("call", "bad"), [(call, bad) for call, values in CALLS for bad in values])
def test_arguments_outside_their_domain_change_nothing(
    call: Callable[[CacheBlockLifecycle, Any], object], bad: Any
) -> None:
    lifecycle = lifecycle_of(A)
    lifecycle._access_clock = U64_MAX  # a domain error comes before any refusal
    before = copy.deepcopy(state(lifecycle))
    with pytest.raises((TypeError, ValueError)):
        call(lifecycle, bad)
    assert state(lifecycle) == before


def test_new_is_the_constructor() -> None:
    assert state(CacheBlockLifecycle.new()) == state(CacheBlockLifecycle()) == (0, {}, {})


# Values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail",
    [
        MutableCacheTail(),
        MutableCacheTail(0, 37),
        MutableCacheTail(U64_MAX, I64_MAX),
        MutableCacheTail(0, I64_MIN),
    ],
)
def test_a_tail_comes_back_from_json_and_msgpack(tail: MutableCacheTail) -> None:
    assert msgspec.json.decode(msgspec.json.encode(tail), type=MutableCacheTail) == tail
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(tail), type=MutableCacheTail) == tail
    assert msgspec.to_builtins(tail) == {"bytes": tail.bytes, "end": tail.end}


def test_a_missing_key_of_a_tail_is_zero_and_an_unknown_one_is_ignored() -> None:
    decoded = msgspec.json.decode(b'{"end": 4, "colour": [1]}', type=MutableCacheTail)
    assert decoded == MutableCacheTail(0, 4)
    assert msgspec.json.decode(b"{}", type=MutableCacheTail) == MutableCacheTail()


@pytest.mark.parametrize(
    "text",
    [
        '{"bytes": -1}',
        '{"bytes": 18446744073709551616}',
        '{"end": 9223372036854775808}',
        '{"end": -9223372036854775809}',
        '{"end": 1' + "0" * 5000 + "}",
        '{"bytes": 1.5}',
        '{"bytes": true}',
        '{"bytes": null}',
        '{"bytes": NaN}',
        '{"bytes": "1"}',
        "[]",
        '{"bytes": ' + "[" * 1000 + "]" * 1000 + "}",
        '{"bytes": 1',
        "",
    ],
)
def test_hostile_json_of_a_tail_is_a_decode_error(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text, type=MutableCacheTail)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bytes": -1}, ValueError),
        ({"bytes": U64_MAX + 1}, ValueError),
        ({"bytes": True}, TypeError),
        ({"end": I64_MAX + 1}, ValueError),
        ({"end": 0.0}, TypeError),
    ],
)
def test_a_tail_checks_its_domain(fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        MutableCacheTail(**fields)
    with pytest.raises(error):
        msgspec.structs.replace(TAIL, **fields)


def test_a_tail_is_immutable_and_hashable() -> None:
    with pytest.raises(AttributeError):
        TAIL.end = 5  # type: ignore[misc]
    assert len({TAIL, MutableCacheTail(24, 3), MutableCacheTail(24, 4)}) == 2


def test_spellings_of_the_policies() -> None:
    assert [policy.value for policy in CacheEvictionPolicy] == [
        "least_recently_used",
        "least_frequently_used",
    ]
    for policy in CacheEvictionPolicy:
        text = msgspec.json.encode(policy)
        assert msgspec.json.decode(text, type=CacheEvictionPolicy) is policy
