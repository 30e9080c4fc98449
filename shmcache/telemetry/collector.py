"""What a session keeps to be able to tell: its report, and what happened to each layer.

Why: residency is counted anew at each snapshot, activity accumulates. They are merged only when
somebody asks, so that recording stays a plain assignment.

Contract: a backend counts each event twice, in `report` and in the row of its layer (or in the
unassigned row). Then, after `finalize_snapshot`, the rows with the overflow row add up to the
report. Nothing is lost: what has no row of its own is in the overflow row.

Concurrency: no lock; the session's lock guards it.

Errors: arguments outside their domain raise `TypeError` or `ValueError`, before any change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Self

from shmcache.bounds import instance, u64, usize
from shmcache.telemetry.report import (
    CACHE_RESIDENCY_LAYER_REPORT_LIMIT,
    CacheLayerResidencyReport,
    CacheLayerResidencyStats,
    CacheResidencyReport,
)


class CacheResidencyTelemetry:
    """The collector of one session (see the module)."""

    __slots__ = ("_layers", "_report", "_unassigned")

    def __init__(self, queue_capacity: int = 0) -> None:
        self._report = CacheResidencyReport(queue_capacity=queue_capacity)
        self._layers: dict[int, CacheLayerResidencyStats] = {}
        self._unassigned = CacheLayerResidencyStats()

    @classmethod
    def new(cls, queue_capacity: int = 0) -> Self:
        return cls(queue_capacity)

    @property
    def report(self) -> CacheResidencyReport:
        """The live report: the backend writes to it, readers get a deep copy."""
        return self._report

    def layer_activity_mut(self, global_layer: int) -> CacheLayerResidencyStats:
        """The row to count this layer's activity in. Asking claims it, for ever.

        Once CACHE_RESIDENCY_LAYER_REPORT_LIMIT layers have a row, others get the unassigned one.
        """
        row = self._layers.get(usize(global_layer, "global_layer"))
        if row is None:
            if len(self._layers) == CACHE_RESIDENCY_LAYER_REPORT_LIMIT:
                return self._unassigned
            row = self._layers[global_layer] = CacheLayerResidencyStats()
        return row

    def unassigned_activity_mut(self) -> CacheLayerResidencyStats:
        """The row to count work in that belongs to no layer."""
        return self._unassigned

    def finalize_snapshot(
        self,
        current: Mapping[int, CacheLayerResidencyStats],
        device_budget_bytes: int,
        host_budget_bytes: int,
        disk_budget_bytes: int | None,
    ) -> None:
        """Write the layers' rows and the peaks of the report; calling it again changes nothing.

        `current` is the residency counted just now; it and its rows are left alone. Layers with
        activity come first, then those of `current` in ascending order, until the limit. A level
        above its budget moves no peak: it will be rolled back (a disk budget of None is no limit).
        """
        for layer, stats in current.items():
            usize(layer, "a layer of current")
            instance(stats, CacheLayerResidencyStats, "a row of current")
        u64(device_budget_bytes, "device_budget_bytes")
        u64(host_budget_bytes, "host_budget_bytes")
        if disk_budget_bytes is not None:
            u64(disk_budget_bytes, "disk_budget_bytes")
        self._write_rows(current)
        self._advance_peaks(device_budget_bytes, host_budget_bytes, disk_budget_bytes)

    def _write_rows(self, current: Mapping[int, CacheLayerResidencyStats]) -> None:
        silent = sorted(current.keys() - self._layers.keys())
        room = CACHE_RESIDENCY_LAYER_REPORT_LIMIT - len(self._layers)
        rows = []
        for layer in sorted([*self._layers, *silent[:room]]):
            row = copy.copy(current[layer]) if layer in current else CacheLayerResidencyStats()
            if layer in self._layers:
                row.add_activity(self._layers[layer])
            rows.append(CacheLayerResidencyReport(layer, row))
        overflow = CacheLayerResidencyStats()
        for layer in silent[room:]:
            overflow.accumulate(current[layer])
        overflow.add_activity(self._unassigned)
        self._report.per_layer = rows
        self._report.per_layer_overflow_layers = len(silent[room:])
        self._report.per_layer_overflow = overflow

    def _advance_peaks(self, device_budget: int, host_budget: int, disk_budget: int | None) -> None:
        report = self._report
        if report.current_device_bytes <= device_budget:
            report.peak_device_bytes = max(report.peak_device_bytes, report.current_device_bytes)
        if report.current_host_bytes <= host_budget:
            report.peak_host_bytes = max(report.peak_host_bytes, report.current_host_bytes)
        if disk_budget is None or report.current_disk_bytes <= disk_budget:
            report.peak_disk_bytes = max(report.peak_disk_bytes, report.current_disk_bytes)
        report.peak_in_flight_write_bytes = max(
            report.peak_in_flight_write_bytes, report.in_flight_write_bytes
        )
        report.peak_in_flight_host_demotion_bytes = max(
            report.peak_in_flight_host_demotion_bytes, report.in_flight_host_demotion_bytes
        )
