"""Telemetry: what counting one event costs, and a snapshot under the session's lock."""

from __future__ import annotations

import msgspec
from rows import Row, median_ns

import shmcache as sc


class _Plain(msgspec.Struct):
    demand_hits: int = 0


def run() -> list[Row]:
    """All rows; needs about two seconds."""
    telemetry = sc.CacheResidencyTelemetry()
    layers = sc.CACHE_RESIDENCY_LAYER_REPORT_LIMIT
    current = {layer: sc.CacheLayerResidencyStats(device_blocks=9) for layer in range(layers)}
    for layer in range(layers):
        row = telemetry.layer_activity_mut(layer)
        row.demand_hits = row.transfer_bytes = row.transfer_wait = 7
    row, plain = telemetry.layer_activity_mut(0), _Plain()

    def count() -> None:
        row.demand_hits += 1

    def count_plain() -> None:
        plain.demand_hits += 1

    one, peer = median_ns(count, calls=50_000), median_ns(count_plain, calls=50_000)
    snapshot = median_ns(
        lambda: telemetry.finalize_snapshot(current, 1 << 30, 1 << 30, None), calls=20
    )
    return [
        Row("count one event", one, "ns", "a plain msgspec.Struct", one / peer, "5x"),
        Row(f"finalize_snapshot of {layers} layers", snapshot / 1e6, "ms"),
    ]
