"""T2, T8: fields, defaults, domains, equality, and what crosses processes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmcache.bounds import U64_MAX
from shmcache.telemetry import (
    CacheLayerResidencyReport,
    CacheLayerResidencyStats,
    CacheResidencyReport,
    CacheResidencyTotals,
)
from shmcache.telemetry.report import COUNTERS as LAYER_COUNTERS
from shmcache.telemetry.report import GAUGES as LAYER_GAUGES
from tests.telemetry.names import (
    ADDITIVE,
    COUNTERS,
    GAUGES,
    NOT_ADDITIVE,
    PEAK,
    REPORT_LAYERS,
    REPORT_PROCESS,
)

Stats = CacheLayerResidencyStats
Report = CacheResidencyReport
NUMBERS = [name for name in ADDITIVE + NOT_ADDITIVE if name not in REPORT_LAYERS + REPORT_PROCESS]

u64s = st.integers(0, U64_MAX) | st.sampled_from([0, 1, U64_MAX])
rows = st.dictionaries(st.sampled_from([*GAUGES, *COUNTERS, PEAK]), u64s).map(
    lambda fields: Stats(**fields)
)
layer_reports = st.builds(CacheLayerResidencyReport, u64s, rows)


def report_of(fields: dict[str, Any]) -> Report:
    return Report(**fields)


@st.composite
def reports(draw: st.DrawFn) -> Report:
    fields: dict[str, Any] = draw(st.dictionaries(st.sampled_from(NUMBERS), u64s))
    fields |= draw(st.dictionaries(st.sampled_from(REPORT_PROCESS), st.none() | u64s))
    fields["per_layer"] = draw(st.lists(layer_reports, max_size=3))
    return Report(per_layer_overflow=draw(rows), **fields)


def test_t2_a_layer_has_31_fields_of_zero() -> None:
    assert list(Stats.__struct_fields__) == [*GAUGES, *COUNTERS, PEAK]
    assert len(Stats.__struct_fields__) == 31
    assert (list(LAYER_GAUGES), list(LAYER_COUNTERS)) == (GAUGES, COUNTERS)
    assert set(msgspec.structs.astuple(Stats())) == {0}
    assert CacheLayerResidencyReport() == CacheLayerResidencyReport(0, Stats())
    assert CacheLayerResidencyReport().stats is not CacheLayerResidencyReport().stats


def test_t2_a_report_has_54_fields_at_their_defaults() -> None:
    assert sorted(Report.__struct_fields__) == sorted(ADDITIVE + NOT_ADDITIVE)
    assert len(Report.__struct_fields__) == 54
    fresh = Report()
    for name in Report.__struct_fields__:
        value = getattr(fresh, name)
        if name in REPORT_PROCESS:
            assert value is None
        elif name == "per_layer":
            assert value == []
        elif name == "per_layer_overflow":
            assert value == Stats()
        else:
            assert (type(value), value) == (int, 0)
    assert fresh.per_layer is not Report().per_layer
    assert fresh.per_layer_overflow is not Report().per_layer_overflow


@given(reports() | layer_reports | rows)
@example(report_of(dict.fromkeys(NUMBERS, U64_MAX)))
@example(Stats(**dict.fromkeys([*GAUGES, *COUNTERS, PEAK], U64_MAX)))
def test_round_trips(value: Report | CacheLayerResidencyReport | Stats) -> None:
    cls: Any = type(value)
    for twin in (
        msgspec.json.decode(msgspec.json.encode(value), type=cls),
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=cls),
        msgspec.convert(msgspec.to_builtins(value), cls),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
    ):
        assert twin == value
        assert twin is not value


def test_equality_is_by_value_of_every_field() -> None:
    for name in ADDITIVE + NOT_ADDITIVE:
        changed = Report()
        other: Any = 1
        if name == "per_layer":
            other = [CacheLayerResidencyReport(3)]
        elif name == "per_layer_overflow":
            other = Stats(failures=1)
        setattr(changed, name, other)
        assert changed != Report()
        assert changed == msgspec.structs.replace(Report(), **{name: other})
    with pytest.raises(TypeError, match="unhashable"):
        hash(Report())


def test_t8_numbers_keep_their_domain() -> None:
    for name in NUMBERS:
        report = Report()
        with pytest.raises(ValueError, match=name):
            setattr(report, name, -1)
        for odd in (True, 1.0, None, "1", Stats()):
            with pytest.raises(TypeError, match=name):
                setattr(report, name, odd)
        assert report == Report()
        setattr(report, name, 1 << 200)
        assert getattr(report, name) == U64_MAX
        for bad, error in ((U64_MAX + 1, ValueError), (-1, ValueError), (True, TypeError)):
            with pytest.raises(error, match=name):
                report_of({name: bad})


def test_other_fields_keep_their_type() -> None:
    report, row = Report(), CacheLayerResidencyReport()
    refused: list[tuple[msgspec.Struct, str, Any]] = [
        (report, "per_layer", 5),
        (report, "per_layer", None),
        (report, "per_layer_overflow", 0),
        (report, "per_layer_overflow", {}),
        (report, "process_rss_bytes", 1.5),
        (row, "stats", 3),
        (row, "global_layer", "3"),
    ]
    for struct, name, value in refused:
        with pytest.raises(TypeError, match=name):
            setattr(struct, name, value)
    for target in (report, row, Stats()):
        with pytest.raises(AttributeError):
            setattr(target, "unheard_of", 1)  # noqa: B010 (mypy knows it is wrong)
    report.process_rss_bytes = 1 << 70
    assert report.process_rss_bytes == U64_MAX
    report.process_rss_bytes = None


class Loud(int):
    """An int subclass, which no encoder knows."""


def test_subclasses_of_int_become_plain() -> None:
    report = Report(failures=Loud(3))
    report.demand_hits = Loud(4)
    assert (type(report.failures), type(report.demand_hits)) == (int, int)
    with pytest.raises(ValueError, match="demand_hits"):
        report.demand_hits = Loud(U64_MAX + 1)


HOSTILE = [
    b"",
    b"[]",
    b"null",
    b"{",
    b'{"failures": NaN}',
    b'{"failures": Infinity}',
    b'{"failures": 1e400}',
    b'{"failures": 1.5}',
    b'{"failures": true}',
    b'{"failures": "1"}',
    b'{"failures": null}',
    b'{"failures": -1}',
    b'{"failures": 18446744073709551616}',
    b'{"failures": ' + b"9" * 5000 + b"}",
    b'{"per_layer": {}}',
    b'{"per_layer": [1]}',
    b'{"per_layer": [{"stats": {"failures": -1}}]}',
    b'{"per_layer": [{"global_layer": -1}]}',
    b'{"per_layer_overflow": null}',
    b'{"per_layer": ' + b"[" * 100_000,
    b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"failures": 1}\x00',
    b'\xff\xfe{"failures": 1}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:40]))
def test_hostile_text_is_refused_with_a_typed_error(text: bytes) -> None:
    for cls in (Report, CacheResidencyTotals):
        if cls is CacheResidencyTotals and b"per_layer" in text:
            continue  # an unknown key to it
        with pytest.raises((msgspec.DecodeError, RecursionError)):
            msgspec.json.decode(text, type=cls)


def test_unknown_keys_are_ignored_and_the_last_of_two_counts() -> None:
    """msgspec's rule for duplicates; a report carries no identity that one could hide."""
    text = b'{"failures": 1, "of_a_newer_release": [{}], "failures": 2}'
    assert msgspec.json.decode(text, type=Report) == Report(failures=2)
