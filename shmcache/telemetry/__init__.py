"""Bounded reports of what a session's cache holds and does, and their sum over sessions."""

from shmcache.telemetry.collector import CacheResidencyTelemetry
from shmcache.telemetry.process import ProcessSample, sample_process, sample_process_of
from shmcache.telemetry.report import (
    CACHE_RESIDENCY_LAYER_REPORT_LIMIT,
    CacheLayerResidencyReport,
    CacheLayerResidencyStats,
    CacheResidencyReport,
)
from shmcache.telemetry.totals import CacheResidencyTotals

__all__ = [
    "CACHE_RESIDENCY_LAYER_REPORT_LIMIT",
    "CacheLayerResidencyReport",
    "CacheLayerResidencyStats",
    "CacheResidencyReport",
    "CacheResidencyTelemetry",
    "CacheResidencyTotals",
    "ProcessSample",
    "sample_process",
    "sample_process_of",
]
