"""T1, T3 to T9: the worked examples by their letters, the rows, the overflow, the peaks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import U64_MAX, USIZE_MAX
from shmcache.telemetry import (
    CACHE_RESIDENCY_LAYER_REPORT_LIMIT,
    CacheLayerResidencyStats,
    CacheResidencyReport,
    CacheResidencyTelemetry,
)
from tests.telemetry.names import COUNTERS, GAUGES, PEAK

Stats = CacheLayerResidencyStats
LIMIT = CACHE_RESIDENCY_LAYER_REPORT_LIMIT


def finalize(
    telemetry: CacheResidencyTelemetry, current: Mapping[int, Stats]
) -> CacheResidencyReport:
    """A snapshot as it is handed out: a deep copy, made under budgets that do not matter."""
    telemetry.finalize_snapshot(current, 0, 0, None)
    return copy.deepcopy(telemetry.report)


def layers(report: CacheResidencyReport) -> list[int]:
    return [row.global_layer for row in report.per_layer]


def row_of(report: CacheResidencyReport, layer: int) -> Stats:
    (stats,) = (row.stats for row in report.per_layer if row.global_layer == layer)
    return stats


def one_block_each(numbers: Iterable[int]) -> dict[int, Stats]:
    return {number: Stats(device_blocks=1) for number in numbers}


def test_the_limit() -> None:
    assert LIMIT == 128
    assert type(LIMIT) is int


def test_t1_a_late_layers() -> None:
    telemetry = CacheResidencyTelemetry()
    for layer in range(100, 228):
        telemetry.layer_activity_mut(layer).demand_hits += 1
    telemetry.layer_activity_mut(5).demand_misses += 3
    telemetry.unassigned_activity_mut().failures += 6
    report = finalize(telemetry, {5: Stats(device_blocks=1), 100: Stats(host_blocks=2)})
    assert layers(report) == list(range(100, 228))
    assert row_of(report, 100) == Stats(host_blocks=2, demand_hits=1)
    assert row_of(report, 227) == Stats(demand_hits=1)
    assert report.per_layer_overflow_layers == 1
    assert report.per_layer_overflow == Stats(device_blocks=1, demand_misses=3, failures=6)


def test_t1_b_nothing_counted_yet() -> None:
    telemetry = CacheResidencyTelemetry()
    report = finalize(telemetry, one_block_each(range(129, -1, -1)))
    assert layers(report) == list(range(128))
    assert report.per_layer_overflow_layers == 2
    assert report.per_layer_overflow == Stats(device_blocks=2)
    later = finalize(telemetry, one_block_each([129]))  # the layers before it claimed nothing
    assert (layers(later), later.per_layer_overflow_layers) == ([129], 0)


def test_t1_c_history_first() -> None:
    telemetry = CacheResidencyTelemetry()
    telemetry.layer_activity_mut(500)
    report = finalize(telemetry, one_block_each(range(128)))
    assert layers(report) == [*range(127), 500]
    assert report.per_layer_overflow_layers == 1
    assert report.per_layer_overflow == Stats(device_blocks=1)


def test_t1_d_activity_only_then_clear() -> None:
    telemetry = CacheResidencyTelemetry()
    telemetry.layer_activity_mut(500).host_promotions += 2
    finalize(telemetry, one_block_each(range(128)))
    report = finalize(telemetry, {})
    assert layers(report) == [500]
    assert row_of(report, 500) == Stats(host_promotions=2)
    assert report.per_layer_overflow_layers == 0
    assert report.per_layer_overflow == Stats()


def test_t1_e_accumulate() -> None:
    row = Stats(current_device_bytes=11, transfer_bytes=3, attention_scratch_peak_bytes=40)
    other = Stats(current_device_bytes=6, transfer_bytes=9, attention_scratch_peak_bytes=25)
    before = copy.deepcopy(other)
    row.accumulate(other)
    assert row == Stats(current_device_bytes=17, transfer_bytes=12, attention_scratch_peak_bytes=40)
    assert other == before


@pytest.mark.parametrize(("disk_budget", "peak_disk"), [(None, 900), (500, 7), (900, 900)])
def test_t1_f_peaks(disk_budget: int | None, peak_disk: int) -> None:
    telemetry = CacheResidencyTelemetry()
    report, seen = telemetry.report, []
    for device, host, disk, write in ((40, 20, 7, 20), (60, 25, 900, 25), (45, 5, 1, 0)):
        report.current_device_bytes, report.current_host_bytes = device, host
        report.current_disk_bytes, report.in_flight_write_bytes = disk, write
        report.in_flight_host_demotion_bytes = write // 5
        telemetry.finalize_snapshot({}, 50, 20, disk_budget)
        seen.append(
            (
                report.peak_device_bytes,
                report.peak_host_bytes,
                report.peak_disk_bytes,
                report.peak_in_flight_write_bytes,
                report.peak_in_flight_host_demotion_bytes,
            )
        )
    assert seen == [(40, 20, 7, 20, 4), (40, 20, peak_disk, 25, 5), (45, 20, peak_disk, 25, 5)]


def test_t1_g_ignored_fields() -> None:
    telemetry = CacheResidencyTelemetry()
    for name in GAUGES:
        setattr(telemetry.layer_activity_mut(3), name, 9)
        setattr(telemetry.unassigned_activity_mut(), name, 9)
    absent = finalize(telemetry, {})
    assert row_of(absent, 3) == absent.per_layer_overflow == Stats()
    present = finalize(telemetry, {3: Stats(device_blocks=2)})
    assert row_of(present, 3) == Stats(device_blocks=2)


def test_t3_twice_the_same() -> None:
    telemetry = CacheResidencyTelemetry(4)
    for layer in (3, 200, 7):
        telemetry.layer_activity_mut(layer).failures += 1
    telemetry.unassigned_activity_mut().transfer_wait += 5
    current = one_block_each(range(130))
    before = copy.deepcopy(current)
    first = finalize(telemetry, MappingProxyType(current))
    assert finalize(telemetry, MappingProxyType(current)) == first
    assert current == before
    assert first.queue_capacity == 4


def test_t3_what_is_in_a_current_row_is_kept_and_added_to() -> None:
    telemetry = CacheResidencyTelemetry()
    row = telemetry.layer_activity_mut(1)
    row.demand_hits, row.attention_scratch_peak_bytes = 2, 10
    current = {1: Stats(demand_hits=5, attention_scratch_peak_bytes=7, disk_blocks=1)}
    assert row_of(finalize(telemetry, current), 1) == Stats(
        demand_hits=7, attention_scratch_peak_bytes=10, disk_blocks=1
    )


def test_t4_a_snapshot_does_not_change_afterwards() -> None:
    telemetry = CacheResidencyTelemetry()
    telemetry.layer_activity_mut(1).demand_hits += 1
    current = {1: Stats(device_blocks=1), 2: Stats(device_blocks=1)}
    telemetry.finalize_snapshot(current, 0, 0, None)
    rows, overflow = telemetry.report.per_layer, telemetry.report.per_layer_overflow
    kept = copy.deepcopy((rows, overflow))
    telemetry.layer_activity_mut(1).demand_hits += 1
    telemetry.unassigned_activity_mut().failures += 1
    current[2].device_blocks = 77
    assert (rows, overflow) == kept
    finalize(telemetry, current)  # its rows are fresh objects, too
    assert (rows, overflow) == kept
    assert telemetry.layer_activity_mut(1).demand_hits == 2


def test_t5_late_layers_and_no_layer_share_one_row() -> None:
    telemetry = CacheResidencyTelemetry()
    rows = [telemetry.layer_activity_mut(layer) for layer in range(1000, 1128)]
    assert len({id(row) for row in rows}) == LIMIT
    overflow = telemetry.unassigned_activity_mut()
    assert telemetry.layer_activity_mut(0) is overflow
    assert telemetry.layer_activity_mut(USIZE_MAX) is overflow
    assert telemetry.layer_activity_mut(1000) is rows[0]
    assert finalize(telemetry, {}).per_layer_overflow_layers == 0


LAYERS = st.integers(0, 300)
AMOUNTS = st.integers(0, 10**6)
EVENTS = st.lists(st.tuples(LAYERS | st.none(), st.sampled_from(COUNTERS), AMOUNTS), max_size=60)


def count(telemetry: CacheResidencyTelemetry, layer: int | None, name: str, amount: int) -> None:
    """Count one event as a backend must: in the report, and in the row of its layer."""
    for row in (
        telemetry.report,
        telemetry.unassigned_activity_mut()
        if layer is None
        else telemetry.layer_activity_mut(layer),
    ):
        setattr(row, name, getattr(row, name) + amount)


def check_double_entry(report: CacheResidencyReport) -> None:
    rows = [row.stats for row in report.per_layer] + [report.per_layer_overflow]
    for name in GAUGES[1:] + COUNTERS:
        assert sum(getattr(row, name) for row in rows) == getattr(report, name), name
    assert max(row.attention_scratch_peak_bytes for row in rows) == getattr(report, PEAK)


def test_t6_300_layers() -> None:
    telemetry = CacheResidencyTelemetry()
    report = telemetry.report
    current = {}
    for layer in range(300):
        current[layer] = Stats()
        for number, name in enumerate(GAUGES[1:]):
            setattr(current[layer], name, layer + number)
            setattr(report, name, getattr(report, name) + layer + number)
        for number, name in enumerate(COUNTERS):
            count(telemetry, (layer * 7) % 300, name, layer * number)
        row = telemetry.layer_activity_mut((layer * 7) % 300)
        row.attention_scratch_peak_bytes = max(row.attention_scratch_peak_bytes, layer)
        report.attention_scratch_peak_bytes = layer
    finalized = finalize(telemetry, current)
    assert len(finalized.per_layer) == LIMIT
    assert finalized.per_layer_overflow_layers == 300 - LIMIT
    check_double_entry(finalized)


@given(EVENTS, st.dictionaries(LAYERS, AMOUNTS, max_size=150), st.integers(0, LIMIT))
def test_t6_t7_nothing_is_lost(
    events: list[tuple[int | None, str, int]], blocks: dict[int, int], claimed: int
) -> None:
    telemetry = CacheResidencyTelemetry()
    for layer in range(1000, 1000 + claimed):
        telemetry.layer_activity_mut(layer)
    for where, name, amount in events:
        count(telemetry, where, name, amount)
        count(telemetry, where, "transfer_wait", amount)
    current = {layer: Stats(host_blocks=amount) for layer, amount in blocks.items()}
    telemetry.report.host_blocks = sum(blocks.values())
    report = finalize(telemetry, current)
    check_double_entry(report)
    assert layers(report) == sorted(set(layers(report)))
    assert len(report.per_layer) <= LIMIT
    assert type(report.transfer_wait) is int
    shown = {row.global_layer for row in report.per_layer}
    assert report.per_layer_overflow_layers == len(current.keys() - shown)
    # Who has activity has a row, and of the silent ones the lowest have.
    silent = sorted(current.keys() - telemetry._layers.keys())
    assert set(telemetry._layers) <= shown
    assert [layer for layer in silent if layer in shown] == silent[: LIMIT - len(telemetry._layers)]


def test_t7_durations_are_exact() -> None:
    telemetry = CacheResidencyTelemetry()
    for _ in range(3):
        telemetry.layer_activity_mut(1).transfer_wait += 2**53 + 1  # a float would lose the 1
    report = finalize(telemetry, {1: Stats(transfer_wait=1)})
    assert row_of(report, 1).transfer_wait == 3 * (2**53 + 1) + 1


def test_t8_a_number_at_the_bound_stays_there() -> None:
    for name in [*GAUGES, *COUNTERS]:
        telemetry = CacheResidencyTelemetry()
        full = Stats(**{name: U64_MAX})
        for row in (full, telemetry.report, telemetry.layer_activity_mut(1)):
            setattr(row, name, U64_MAX)
            setattr(row, name, getattr(row, name) + 1)
            assert getattr(row, name) == U64_MAX
        full.accumulate(Stats(**{name: 5}))
        assert getattr(full, name) == U64_MAX
        report = finalize(telemetry, {1: full, 2: full})
        assert getattr(row_of(report, 1), name) == U64_MAX


def test_t9_tokens_are_a_sum_in_the_overflow_and_a_maximum_in_the_report() -> None:
    telemetry = CacheResidencyTelemetry()
    current = {layer: Stats(logical_cached_tokens=100) for layer in range(130)}
    telemetry.report.logical_cached_tokens = max(s.logical_cached_tokens for s in current.values())
    report = finalize(telemetry, current)
    assert report.per_layer_overflow.logical_cached_tokens == 200
    assert report.logical_cached_tokens == 100


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (({-1: Stats()}, 0, 0, None), ValueError),
        (({USIZE_MAX + 1: Stats()}, 0, 0, None), ValueError),
        (({True: Stats()}, 0, 0, None), TypeError),
        (({"1": Stats()}, 0, 0, None), TypeError),
        (({1: {}}, 0, 0, None), TypeError),
        (({}, -1, 0, None), ValueError),
        (({}, 0, U64_MAX + 1, None), ValueError),
        (({}, 0, None, None), TypeError),
        (({}, 0, 0, -1), ValueError),
        (({}, 0, 0, False), TypeError),
        (([], 0, 0, None), AttributeError),
    ],
)
def test_arguments_are_checked_before_anything_changes(
    arguments: Any, error: type[Exception]
) -> None:
    telemetry = CacheResidencyTelemetry()
    telemetry.layer_activity_mut(1).failures += 1
    telemetry.report.current_device_bytes = 7
    before = finalize(telemetry, {2: Stats(device_blocks=1)})
    with pytest.raises(error):
        telemetry.finalize_snapshot(*arguments)
    assert telemetry.report == before


def test_a_collector_is_made_with_its_queue_capacity_only() -> None:
    telemetry = CacheResidencyTelemetry.new(queue_capacity=5)
    assert telemetry.report == CacheResidencyReport(queue_capacity=5)
    assert CacheResidencyTelemetry().report == CacheResidencyReport()
    with pytest.raises(AttributeError):
        telemetry.report = CacheResidencyReport()  # type: ignore[misc]
    for bad in (True, None, 1.5):
        with pytest.raises(TypeError, match="queue_capacity"):
            CacheResidencyTelemetry(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="global_layer"):
            telemetry.layer_activity_mut(bad)  # type: ignore[arg-type]
    for outside in (-1, USIZE_MAX + 1):
        with pytest.raises(ValueError, match="queue_capacity"):
            CacheResidencyTelemetry(outside)
        with pytest.raises(ValueError, match="global_layer"):
            telemetry.layer_activity_mut(outside)
    assert finalize(telemetry, {}).per_layer == []
