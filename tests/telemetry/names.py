"""The fields of the contract's tables, written out a second time."""

from __future__ import annotations

GAUGES = """
    logical_cached_tokens key_value_blocks compressed_latent_blocks device_blocks host_blocks
    disk_blocks current_device_bytes current_host_bytes current_disk_bytes mutable_tail_bytes
    in_flight_write_blocks in_flight_write_bytes in_flight_host_demotion_blocks
    in_flight_host_demotion_bytes protected_recent_blocks protected_prefix_blocks
""".split()
COUNTERS = """
    host_promotions disk_promotions host_demotions disk_demotions transfer_bytes transfer_wait
    demand_hits demand_misses in_flight_waits failures prefill_full_attention_blocks
    prefill_full_attention_bytes decode_full_attention_blocks decode_full_attention_bytes
""".split()
PEAK = "attention_scratch_peak_bytes"

# Of the report only: fields that no layer has.
REPORT_COUNTERS = """
    evictions discarded_sliding_blocks block_seals tail_allocations queue_backpressure
    cancellations prompt_cache_saves prompt_cache_loads prompt_cache_bytes imported_mapped_shards
""".split()
REPORT_PEAKS = """
    peak_device_bytes peak_host_bytes peak_disk_bytes peak_in_flight_write_bytes
    peak_in_flight_host_demotion_bytes queue_peak_occupancy
""".split()
REPORT_LAYERS = ["per_layer", "per_layer_overflow_layers", "per_layer_overflow"]
REPORT_PROCESS = [
    "process_rss_bytes",
    "process_minor_page_faults",
    "process_major_page_faults",
]
ADDITIVE = [*GAUGES, *COUNTERS, *REPORT_COUNTERS, "queue_capacity"]
NOT_ADDITIVE = [*REPORT_PEAKS, PEAK, *REPORT_LAYERS, *REPORT_PROCESS]
