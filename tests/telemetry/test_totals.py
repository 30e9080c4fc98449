"""Sums over sessions and processes: what adds up, what does not and says so; process sampling."""

from __future__ import annotations

import copy
import resource
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import U64_MAX
from shmcache.telemetry import (
    CacheLayerResidencyReport,
    CacheResidencyReport,
    CacheResidencyTotals,
    sample_process,
)
from shmcache.telemetry.totals import NOT_ADDITIVE as REASONS
from tests.support import Worker
from tests.telemetry.names import ADDITIVE, NOT_ADDITIVE


def report_of(fields: dict[str, Any]) -> CacheResidencyReport:
    return CacheResidencyReport(**fields)


additive_reports = st.dictionaries(st.sampled_from(ADDITIVE), st.integers(0, 10**9)).map(report_of)


@given(st.lists(additive_reports, max_size=6), st.integers(0, 6))
def test_sums_in_parts_are_the_sum(reports: list[CacheResidencyReport], cut: int) -> None:
    """Each process may add up its own sessions, and the parts arrive as bytes in any order."""
    before = copy.deepcopy(reports)
    whole = CacheResidencyTotals.of(reports)
    assert whole.sessions == len(reports)
    for name in ADDITIVE:
        assert getattr(whole, name) == sum(getattr(report, name) for report in reports)
    parts = [CacheResidencyTotals.of(part) for part in (reports[cut:], reports[:cut])]
    sent = [msgspec.json.decode(msgspec.json.encode(p), type=CacheResidencyTotals) for p in parts]
    assert CacheResidencyTotals.of(sent) == whole
    assert reports == before


def test_every_field_either_adds_up_or_says_why_not() -> None:
    totals: Any = CacheResidencyTotals.of([CacheResidencyReport(queue_capacity=3)] * 2)
    assert set(totals.__struct_fields__) == {*ADDITIVE, "sessions"}
    assert set(REASONS) == set(NOT_ADDITIVE)
    assert totals.queue_capacity == 6
    for name in NOT_ADDITIVE:
        with pytest.raises(AttributeError, match=f"^{name} does not add up, .* each session's"):
            getattr(totals, name)
    with pytest.raises(AttributeError, match="has no unheard_of"):
        _ = totals.unheard_of
    assert not hasattr(totals, "peak_host_bytes")


def test_sums_saturate() -> None:
    totals = CacheResidencyTotals(sessions=U64_MAX, transfer_bytes=U64_MAX - 1)
    totals.add(CacheResidencyReport(transfer_bytes=2))
    assert (totals.sessions, totals.transfer_bytes) == (U64_MAX, U64_MAX)


def test_only_reports_and_sums_are_added() -> None:
    odd: Any
    for odd in (None, {}, CacheLayerResidencyReport(), 1):
        with pytest.raises(TypeError, match="part"):
            CacheResidencyTotals().add(odd)


def test_reports_of_other_processes() -> None:
    code = """
        import msgspec
        from shmcache.telemetry import *
        def report(hits):
            telemetry = CacheResidencyTelemetry(2)
            telemetry.report.demand_hits = hits
            sample_process(telemetry.report)
            telemetry.finalize_snapshot({3: CacheLayerResidencyStats(device_blocks=1)}, 1, 1, None)
            return msgspec.json.encode(telemetry.report).decode()
    """
    with Worker(code) as one, Worker(code) as other:
        sent = [one.call("report(5)"), other.call("report(7)")]
    reports = [msgspec.json.decode(text, type=CacheResidencyReport) for text in sent]
    totals = CacheResidencyTotals.of(reports)
    assert (totals.sessions, totals.demand_hits, totals.queue_capacity) == (2, 12, 4)
    assert all(report.process_rss_bytes for report in reports)
    assert [report.per_layer[0].global_layer for report in reports] == [3, 3]


def test_sampling_this_process() -> None:
    report = CacheResidencyReport()
    sample_process(report)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    assert report.process_rss_bytes is not None
    assert 1 << 20 < report.process_rss_bytes <= usage.ru_maxrss * 1024
    assert 0 < (report.process_minor_page_faults or 0) <= usage.ru_minflt
    assert report.process_major_page_faults is not None
    assert report.process_major_page_faults <= usage.ru_majflt


def test_a_sampling_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(who: int) -> None:
        raise OSError

    report = CacheResidencyReport(process_rss_bytes=5)
    monkeypatch.setattr(resource, "getrusage", broken)
    sample_process(report)
    assert report == CacheResidencyReport(process_rss_bytes=5)
