"""What a session tells about its cache: rows per layer, and one report over all of them.

Why: operators and schedulers read these, often from another process, so a report is bounded
whatever layer numbers a backend invents, and its fields say by their kind how they may be combined:
gauges are the state at the snapshot, counters only grow, peaks are maxima.

Contract: mutable, equal by value; a backend writes to them directly. Numbers are u64 and saturate
(saturating.py). They survive JSON and msgpack; unknown keys are ignored.

Units: "blocks" are sealed blocks, unless a field says otherwise; "bytes" are logical, except host
and in-flight bytes, which are physical capacity; `transfer_wait` is in nanoseconds.

Concurrency: no lock; the session's lock guards them. What is handed out must be a deep copy.
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from shmcache.bounds import instance
from shmcache.telemetry.saturating import Saturating

CACHE_RESIDENCY_LAYER_REPORT_LIMIT: Final[int] = 128


class CacheLayerResidencyStats(Saturating):
    """One layer: where its blocks are now, and what happened to it so far."""

    # Gauges.
    logical_cached_tokens: int = 0  # the position the layer reaches
    key_value_blocks: int = 0
    compressed_latent_blocks: int = 0
    device_blocks: int = 0  # those being demoted included
    host_blocks: int = 0  # those being demoted included
    disk_blocks: int = 0
    current_device_bytes: int = 0  # blocks and mutable tails
    current_host_bytes: int = 0  # in-flight ownership included
    current_disk_bytes: int = 0
    mutable_tail_bytes: int = 0  # part of current_device_bytes
    in_flight_write_blocks: int = 0  # host buffers held by background writes
    in_flight_write_bytes: int = 0  # part of current_host_bytes
    in_flight_host_demotion_blocks: int = 0  # these hold device and host memory at once
    in_flight_host_demotion_bytes: int = 0  # part of current_host_bytes
    protected_recent_blocks: int = 0  # kept by the recent window
    protected_prefix_blocks: int = 0  # protected prefix or sink blocks

    # Counters.
    host_promotions: int = 0  # host to device
    disk_promotions: int = 0  # to the device after a disk read
    host_demotions: int = 0  # device to host, completed
    disk_demotions: int = 0  # to disk, completed, with new or existing backing
    transfer_bytes: int = 0  # moved between tiers
    transfer_wait: int = 0  # time spent waiting at transfer boundaries
    demand_hits: int = 0  # a demanded block was on the device
    demand_misses: int = 0  # a demanded block had to be promoted
    in_flight_waits: int = 0  # a pending operation was joined or awaited
    failures: int = 0  # of residency or transfers
    prefill_full_attention_blocks: int = 0  # blocks and tails scanned
    prefill_full_attention_bytes: int = 0
    decode_full_attention_blocks: int = 0  # blocks and tails scanned
    decode_full_attention_bytes: int = 0

    # A peak.
    attention_scratch_peak_bytes: int = 0

    def accumulate(self, other: CacheLayerResidencyStats) -> None:
        """Add `other`: sums, and the maximum of the peak. So the tokens become a sum of layer
        positions, which is no sequence length.
        """
        self._add(other, GAUGES + COUNTERS)

    def add_activity(self, other: CacheLayerResidencyStats) -> None:
        """Add only what happened: the counters, and the maximum of the peak."""
        self._add(other, COUNTERS)

    def _add(self, other: CacheLayerResidencyStats, names: tuple[str, ...]) -> None:
        instance(other, CacheLayerResidencyStats, "other")
        for name in names:
            if amount := getattr(other, name):
                setattr(self, name, getattr(self, name) + amount)
        self.attention_scratch_peak_bytes = max(
            self.attention_scratch_peak_bytes, other.attention_scratch_peak_bytes
        )


# A layer's fields by their kind; the last field, a peak, is neither.
_FIRST_COUNTER: Final = CacheLayerResidencyStats.__struct_fields__.index("host_promotions")
GAUGES: Final = CacheLayerResidencyStats.__struct_fields__[:_FIRST_COUNTER]
COUNTERS: Final = CacheLayerResidencyStats.__struct_fields__[_FIRST_COUNTER:-1]


class CacheLayerResidencyReport(Saturating):
    """A layer, by its number in the whole model, and its row."""

    _structured: ClassVar = frozenset({"stats"})

    global_layer: int = 0
    stats: CacheLayerResidencyStats = msgspec.field(default_factory=CacheLayerResidencyStats)


class AdditiveResidency(Saturating):
    """The fields of a report that also mean something when added over sessions and processes.

    A field with the name of a layer's has its meaning, over all layers.
    """

    # Gauges.
    logical_cached_tokens: int = 0  # the maximum over the layers; over sessions: a sum of lengths
    key_value_blocks: int = 0
    compressed_latent_blocks: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    current_device_bytes: int = 0
    current_host_bytes: int = 0
    current_disk_bytes: int = 0
    mutable_tail_bytes: int = 0
    in_flight_write_blocks: int = 0
    in_flight_write_bytes: int = 0
    in_flight_host_demotion_blocks: int = 0
    in_flight_host_demotion_bytes: int = 0
    protected_recent_blocks: int = 0
    protected_prefix_blocks: int = 0
    queue_capacity: int = 0  # set once

    # Counters.
    host_promotions: int = 0
    disk_promotions: int = 0
    host_demotions: int = 0
    disk_demotions: int = 0
    transfer_bytes: int = 0
    transfer_wait: int = 0
    evictions: int = 0  # blocks evicted after all tiers were exhausted
    discarded_sliding_blocks: int = 0
    block_seals: int = 0
    tail_allocations: int = 0
    demand_hits: int = 0
    demand_misses: int = 0
    in_flight_waits: int = 0
    queue_backpressure: int = 0  # requests that a full queue delayed
    cancellations: int = 0  # by reset or truncation
    failures: int = 0
    prefill_full_attention_blocks: int = 0
    prefill_full_attention_bytes: int = 0
    decode_full_attention_blocks: int = 0
    decode_full_attention_bytes: int = 0
    prompt_cache_saves: int = 0
    prompt_cache_loads: int = 0
    prompt_cache_bytes: int = 0
    imported_mapped_shards: int = 0


class CacheResidencyReport(AdditiveResidency):
    """One session. Gauges and counters are the backend's to write, the rest is written by
    `CacheResidencyTelemetry.finalize_snapshot` and `sample_process`.
    """

    _structured: ClassVar = frozenset({"per_layer", "per_layer_overflow"})

    # Peaks; the first three are of admitted levels only.
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    peak_disk_bytes: int = 0
    peak_in_flight_write_bytes: int = 0
    peak_in_flight_host_demotion_bytes: int = 0
    queue_peak_occupancy: int = 0
    attention_scratch_peak_bytes: int = 0

    # Layers: at most CACHE_RESIDENCY_LAYER_REPORT_LIMIT rows, the rest in the overflow row.
    per_layer: list[CacheLayerResidencyReport] = msgspec.field(default_factory=list)
    per_layer_overflow_layers: int = 0
    per_layer_overflow: CacheLayerResidencyStats = msgspec.field(
        default_factory=CacheLayerResidencyStats
    )

    # The process; None while nobody samples.
    process_rss_bytes: int | None = None
    process_minor_page_faults: int | None = None
    process_major_page_faults: int | None = None
