"""The gauges of a report, counted when somebody asks.

Why: bytes are kept as sums because budgets and peaks need them after every change; how many blocks
each layer has where is only looked at by people.

Concurrency: with the session's lock held.
"""

from __future__ import annotations

import copy
from typing import Final

from shmcache.policy.identity import CacheRepresentation, CacheTier
from shmcache.session.backend import HostAllocation
from shmcache.session.core import SessionCore
from shmcache.session.records import BlockRecord, Pending
from shmcache.states.storage import CacheStoragePhase
from shmcache.telemetry import CacheLayerResidencyStats, CacheResidencyReport
from shmcache.telemetry.process import sample_process

_LAYER_GAUGES: Final = (
    "key_value_blocks",
    "compressed_latent_blocks",
    "device_blocks",
    "host_blocks",
    "disk_blocks",
    "mutable_tail_bytes",
    "in_flight_write_blocks",
    "in_flight_host_demotion_blocks",
    "protected_recent_blocks",
    "protected_prefix_blocks",
)


def snapshot(core: SessionCore) -> CacheResidencyReport:
    """The whole report at this instant, as a copy of the caller's own."""
    rows = _rows(core)
    report = core.telemetry.report
    for name in _LAYER_GAUGES:
        setattr(report, name, sum(getattr(row, name) for row in rows.values()))
    reached = (row.logical_cached_tokens for row in rows.values())
    report.logical_cached_tokens = max(reached, default=0)
    _write_levels(core)
    if core.options.process_sampling_enabled:
        sample_process(report)
    core.telemetry.finalize_snapshot(
        rows,
        core.options.device_budget_bytes,
        core.options.host_budget_bytes,
        core.options.disk_budget_bytes,
    )
    core.telling.stand_all()
    return copy.deepcopy(report)


def _write_levels(core: SessionCore) -> None:
    """The bytes of this instant, and the peaks that were seen between reports."""
    report, sums, peaks = core.telemetry.report, core.sums(), core.peaks
    report.current_device_bytes = sums.device
    report.current_host_bytes = sums.host
    report.current_disk_bytes = sums.disk + sums.imported
    report.in_flight_write_bytes = sums.write
    report.in_flight_host_demotion_bytes = sums.demotion
    report.peak_device_bytes = peaks.device
    report.peak_host_bytes = peaks.host
    report.peak_disk_bytes = peaks.disk
    report.peak_in_flight_write_bytes = peaks.write
    report.peak_in_flight_host_demotion_bytes = peaks.demotion


def _rows(core: SessionCore) -> dict[int, CacheLayerResidencyStats]:
    rows: dict[int, CacheLayerResidencyStats] = {}
    counted: set[HostAllocation] = set()

    def row(layer: int) -> CacheLayerResidencyStats:
        return rows.setdefault(layer, CacheLayerResidencyStats())

    for record in core.records.values():
        _count_block(core, record, row(record.id.global_layer), counted)
    for layer, tail in core.lifecycle.tails():
        stats = row(layer)
        stats.mutable_tail_bytes = tail.bytes
        stats.current_device_bytes += tail.bytes
        stats.logical_cached_tokens = max(stats.logical_cached_tokens, tail.end, 0)
    recent = core.lifecycle.recent_protection_counts(
        core.victims.ids(CacheTier.DEVICE), core.options.recent_device_blocks
    )
    for layer, blocks in recent.items():
        row(layer).protected_recent_blocks = blocks
    _count_in_flight(core, rows, counted)
    return rows


def _count_block(
    core: SessionCore,
    record: BlockRecord,
    row: CacheLayerResidencyStats,
    counted: set[HostAllocation],
) -> None:
    id, phase, held = record.id, record.storage.phase, record.counted
    if id.representation is CacheRepresentation.KEY_VALUE:
        row.key_value_blocks += 1
    else:
        row.compressed_latent_blocks += 1
    demoting = phase is CacheStoragePhase.DEMOTING_TO_HOST
    row.device_blocks += phase.tier is CacheTier.DEVICE
    row.host_blocks += phase.tier is CacheTier.HOST or demoting
    row.disk_blocks += phase.tier is CacheTier.DISK
    row.current_device_bytes += held.device
    row.current_host_bytes += held.bound
    row.current_disk_bytes += held.disk + held.imported
    if held.allocation is not None and held.allocation not in counted:
        counted.add(held.allocation)
        row.current_host_bytes += held.allocation.capacity_bytes
    row.in_flight_host_demotion_blocks += demoting
    row.in_flight_host_demotion_bytes += held.demotion
    row.protected_prefix_blocks += core.lifecycle.is_protected_prefix(id)
    row.logical_cached_tokens = max(row.logical_cached_tokens, id.end)


def _count_in_flight(
    core: SessionCore, rows: dict[int, CacheLayerResidencyStats], counted: set[HostAllocation]
) -> None:
    """What outlives its block, or is no part of it; see `Ledger.sums`."""
    ledger, records = core.ledger, core.records
    for write in ledger.writes.values():
        row = rows.setdefault(write.key.id.global_layer, CacheLayerResidencyStats())
        row.in_flight_write_blocks += 1
        row.in_flight_write_bytes += write.transfer_bytes
        if write.allocation not in counted:
            counted.add(write.allocation)
            row.current_host_bytes += write.allocation.capacity_bytes
        if not ledger.has_own_file(records.get(write.key.id)):
            row.current_disk_bytes += write.logical_bytes
    for number, retiring in ledger.retiring_demotions.items():
        id = retiring.operation.block_id
        if not ledger.is_pending(number, records.get(id)):
            row = rows.setdefault(id.global_layer, CacheLayerResidencyStats())
            row.current_device_bytes += retiring.device_bytes
            row.in_flight_host_demotion_blocks += 1
            row.in_flight_host_demotion_bytes += retiring.pending.transfer
            _count_pending(row, retiring.pending, counted)
    for read in ledger.retiring_reads.values():
        row = rows.setdefault(read.layer, CacheLayerResidencyStats())
        _count_pending(row, read.pending, counted)


def _count_pending(
    row: CacheLayerResidencyStats, pending: Pending, counted: set[HostAllocation]
) -> None:
    row.current_host_bytes += pending.bound
    if pending.target is not None and pending.target not in counted:
        counted.add(pending.target)
        row.current_host_bytes += pending.target.capacity_bytes
