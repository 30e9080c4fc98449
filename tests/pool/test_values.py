"""Limits, usage and report: domains, decode behaviour, round trips (P1, P13, P14)."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmcache.bounds import U64_MAX
from shmcache.errors import CachePoolError
from shmcache.pool.values import (
    CachePoolLimits,
    CachePoolReport,
    CachePoolResource,
    CachePoolUsage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Value = CachePoolLimits | CachePoolUsage | CachePoolReport

AXES = ("device_bytes", "host_bytes", "transfer_in_flight_bytes", "disk_bytes")
LIMITS = CachePoolLimits(200, 80, 60, 0)
FULL = CachePoolLimits(U64_MAX, U64_MAX, U64_MAX, U64_MAX)
REPORT_FIELDS = (
    "pool_id",
    "managers",
    "current_device_bytes",
    "peak_device_bytes",
    "current_host_bytes",
    "peak_host_bytes",
    "current_transfer_in_flight_bytes",
    "peak_transfer_in_flight_bytes",
    "current_disk_bytes",
    "peak_disk_bytes",
)


def report_of(numbers: Iterable[int], limits: CachePoolLimits = LIMITS) -> CachePoolReport:
    fields: dict[str, Any] = dict(zip(REPORT_FIELDS, numbers, strict=True))
    return CachePoolReport(**fields, limits=limits)


u64s = st.integers(0, U64_MAX) | st.sampled_from([0, 1, U64_MAX])
amounts = st.builds(CachePoolUsage, u64s, u64s, u64s, u64s)
limits = st.builds(CachePoolLimits, u64s.filter(bool), u64s, u64s.filter(bool), u64s)
reports = st.builds(report_of, st.lists(u64s, min_size=10, max_size=10), limits)


@example(report_of([U64_MAX] * 10, FULL))
@given(amounts | limits | reports)
def test_json_and_msgpack_give_the_value_back(value: Value) -> None:
    cls: Any = type(value)
    assert msgspec.json.decode(msgspec.json.encode(value), type=cls) == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=cls) == value
    assert msgspec.convert(msgspec.to_builtins(value), cls) == value


@given(amounts | limits | reports)
def test_copies_are_equal_and_hash_alike(value: Value) -> None:
    for twin in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert twin == value
        assert hash(twin) == hash(value)


def test_names_and_strings_on_the_wire() -> None:
    report = report_of(range(10))
    plain = msgspec.to_builtins(report)
    assert plain == {
        **{name: number for number, name in enumerate(REPORT_FIELDS)},
        "limits": dict(zip(AXES, (200, 80, 60, 0), strict=True)),
    }
    assert list(plain) == [*REPORT_FIELDS, "limits"]
    assert [msgspec.to_builtins(axis) for axis in CachePoolResource] == [
        "device",
        "host",
        "transfer_in_flight",
        "disk",
    ]
    assert msgspec.convert("transfer_in_flight", CachePoolResource) is (
        CachePoolResource.TRANSFER_IN_FLIGHT
    )


# Domains ------------------------------------------------------------------------------------------

MAKERS: tuple[Callable[..., Value], ...] = (
    CachePoolLimits,
    CachePoolLimits.new,
    CachePoolUsage,
    CachePoolUsage.new,
)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (U64_MAX + 1, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (False, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_a_value_outside_u64_names_its_axis(
    make: Callable[..., Value], position: int, value: object, error: type[Exception]
) -> None:
    arguments: list[object] = [1, 1, 1, 1]
    arguments[position] = value
    with pytest.raises(error, match=f"^{AXES[position]} must be"):
        make(*arguments)
    with pytest.raises(error, match=f"^{AXES[position]} must be"):
        make(**dict(zip(AXES, arguments, strict=True)))


def test_replace_is_checked_too() -> None:
    with pytest.raises(ValueError, match="host_bytes"):
        msgspec.structs.replace(CachePoolUsage(), host_bytes=-1)
    with pytest.raises(CachePoolError.InvalidLimits):
        msgspec.structs.replace(LIMITS, device_bytes=0)


def test_an_int_subclass_is_stored_as_an_int() -> None:
    class Bytes(int):
        pass

    usage = CachePoolUsage(host_bytes=Bytes(24))
    assert type(usage.host_bytes) is int
    assert usage == CachePoolUsage(0, 24, 0, 0)
    assert msgspec.json.decode(msgspec.json.encode(usage), type=CachePoolUsage) == usage


@pytest.mark.parametrize("text", ["-1", "18446744073709551616", "1.0", "true", "null", '"1"'])
def test_decoding_checks_the_domain(text: str) -> None:
    good = msgspec.json.encode(report_of([77] * 10))
    for cls, json in (
        (CachePoolUsage, f'{{"disk_bytes": {text}}}'),
        (CachePoolLimits, msgspec.json.encode(LIMITS).decode().replace("80", text)),
        *((CachePoolReport, _replaced(good, name, text)) for name in REPORT_FIELDS),
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(json, type=cls)


def _replaced(report: bytes, name: str, text: str) -> str:
    before = report.decode()
    after = before.replace(f'"{name}":77', f'"{name}":{text}')
    assert after != before
    return after


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((0, 1, 0, 1), "device_bytes_zero"),
        ((0, 5, 0, 5), "device_bytes_zero"),
        ((0, 0, 1, 0), "device_bytes_zero"),
        ((1, 5, 0, 5), "transfer_in_flight_bytes_zero"),
    ],
)
def test_zero_limits_are_refused_by_constructor_and_decoder(
    arguments: tuple[int, int, int, int], code: str
) -> None:
    json = msgspec.json.encode(dict(zip(AXES, arguments, strict=True)))
    attempts: tuple[Callable[[], CachePoolLimits], ...] = (
        lambda: CachePoolLimits(*arguments),
        lambda: CachePoolLimits.new(*arguments),
        lambda: msgspec.json.decode(json, type=CachePoolLimits),
    )
    for attempt in attempts:
        with pytest.raises(CachePoolError.InvalidLimits) as caught:
            attempt()
        assert caught.value == CachePoolError.InvalidLimits(code)


def test_host_and_disk_may_be_off_and_disk_may_be_small() -> None:
    assert CachePoolLimits(1, 0, 1, 0) == CachePoolLimits.new(1, 0, 1, 0)
    assert CachePoolLimits(1, 1 << 40, 1, 1).disk_bytes == 1


def test_a_domain_error_comes_before_a_zero_limit() -> None:
    with pytest.raises(ValueError, match="disk_bytes"):
        CachePoolLimits(0, 0, 0, -1)


def test_limits_need_every_key_and_ignore_unknown_ones() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"device_bytes": 1, "transfer_in_flight_bytes": 1}, CachePoolLimits)
    assert msgspec.convert({**msgspec.to_builtins(LIMITS), "colour": 1}, CachePoolLimits) == LIMITS


# Usage --------------------------------------------------------------------------------------------


def test_usage_defaults_to_nothing_and_a_missing_key_decodes_as_zero() -> None:
    assert CachePoolUsage() == CachePoolUsage.new() == CachePoolUsage(0, 0, 0, 0)
    decoded = msgspec.json.decode(b'{"host_bytes": 24, "colour": 1}', type=CachePoolUsage)
    assert decoded == CachePoolUsage(host_bytes=24)


@pytest.mark.parametrize("value", [LIMITS, CachePoolUsage(1), report_of(range(10), FULL)])
def test_values_are_immutable(value: Value) -> None:
    with pytest.raises(AttributeError):
        setattr(value, value.__struct_fields__[0], 5)


def test_a_report_may_lag_behind_its_own_limits_and_peaks() -> None:
    report = CachePoolReport(9, 1, 270, 190, 40, 40, 0, 0, 0, 0, LIMITS)
    assert report.current_device_bytes > report.limits.device_bytes > report.peak_device_bytes
