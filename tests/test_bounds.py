"""Domain checks at their edges, and the limits that other files rely on."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import pytest

from shmcache import bounds

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[[object, str], int]

RANGES: tuple[tuple[Check, int, int], ...] = (
    (bounds.u64, 0, 18446744073709551615),
    (bounds.usize, 0, 18446744073709551615),
    (bounds.u32, 0, 4294967295),
    (bounds.nz32, 1, 4294967295),
    (bounds.i64, -9223372036854775808, 9223372036854775807),
    (bounds.i32, -2147483648, 2147483647),
)
each_check = pytest.mark.parametrize(("check", "low", "high"), RANGES)


class Number(IntEnum):
    SEVEN = 7


@each_check
def test_both_ends_are_inside(check: Check, low: int, high: int) -> None:
    for value in (low, high, max(low, 0), 7):
        assert check(value, "x") == value


@each_check
def test_one_beyond_either_end_is_a_value_error(check: Check, low: int, high: int) -> None:
    for value in (low - 1, high + 1, 1 << 200):
        with pytest.raises(ValueError, match=f"size_bytes must be between {low} and {high}"):
            check(value, "size_bytes")


@each_check
@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, b"1", 1 + 0j])
def test_what_is_no_int_is_a_type_error(check: Check, low: int, high: int, value: object) -> None:
    with pytest.raises(TypeError, match="size_bytes must be an int, not"):
        check(value, "size_bytes")


@each_check
def test_an_int_subclass_becomes_a_plain_int(check: Check, low: int, high: int) -> None:
    assert type(check(Number.SEVEN, "x")) is int


def test_an_instance_of_a_class() -> None:
    assert bounds.instance(True, bool, "protected_prefix") is True
    assert bounds.instance(Number.SEVEN, int, "layer") is Number.SEVEN
    for value in (1, None, "True", object()):
        with pytest.raises(TypeError, match="protected_prefix must be a bool, not"):
            bounds.instance(value, bool, "protected_prefix")


def test_bounded_takes_any_range() -> None:
    assert bounds.bounded(1024, "owners_max", 1, bounds.OWNERS_MAX_LIMIT) == 1024
    with pytest.raises(ValueError, match="owners_max"):
        bounds.bounded(0, "owners_max", 1, bounds.OWNERS_MAX_LIMIT)


@pytest.mark.parametrize("name", ["a", "llm", "Llama-3.1_8B", "-", "_", "x" * 100, "a.b", "a..b"])
def test_pool_names(name: str) -> None:
    assert bounds.pool_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "../x", "a b", "a\n", "a\0", "é", "٣", "x" * 101],
)
def test_names_that_are_no_pool_names(name: str) -> None:
    with pytest.raises(ValueError, match="pool name"):
        bounds.pool_name(name)


def test_a_pool_name_is_text() -> None:
    for name in (None, b"llm", 7):
        with pytest.raises(TypeError, match="pool name"):
            bounds.pool_name(name)


def test_defaults_are_within_their_limits() -> None:
    assert bounds.OWNERS_MAX_DEFAULT <= bounds.OWNERS_MAX_LIMIT
    assert bounds.MANAGERS_MAX_DEFAULT <= bounds.MANAGERS_MAX_LIMIT
    assert bounds.RESERVATIONS_MAX_DEFAULT <= bounds.RESERVATIONS_MAX_LIMIT
    assert 0 < bounds.LOCK_SLICE_NS < bounds.LOCK_DEADLINE_NS


def test_a_longest_name_leaves_room_for_a_temporary_suffix() -> None:
    longest = bounds.SEGMENT_PREFIX + "x" * bounds.POOL_NAME_BYTES_MAX
    assert len(longest) + 64 <= 255
