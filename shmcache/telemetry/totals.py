"""Reports of many sessions as one: what adds up, and what does not.

Why: a host has many workers and each has sessions; whoever watches it wants one number. Adding
peaks would invent a moment that never was, and adding process figures would count a process once
per session, so those fields are not here, and asking for one says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Self

from shmcache.bounds import instance
from shmcache.telemetry.report import AdditiveResidency, CacheResidencyReport

_PEAKS: Final = "the peaks of two sessions were at different moments"
_LAYERS: Final = "sessions of different models have different layers"
_PROCESS: Final = "sessions of one process report the same process"

NOT_ADDITIVE: Final = {
    "peak_device_bytes": _PEAKS,
    "peak_host_bytes": _PEAKS,
    "peak_disk_bytes": _PEAKS,
    "peak_in_flight_write_bytes": _PEAKS,
    "peak_in_flight_host_demotion_bytes": _PEAKS,
    "queue_peak_occupancy": _PEAKS,
    "attention_scratch_peak_bytes": _PEAKS,
    "per_layer": _LAYERS,
    "per_layer_overflow_layers": _LAYERS,
    "per_layer_overflow": _LAYERS,
    "process_rss_bytes": _PROCESS,
    "process_minor_page_faults": _PROCESS,
    "process_major_page_faults": _PROCESS,
}


class CacheResidencyTotals(AdditiveResidency):
    """The sum of the reports of `sessions` sessions, in this process or in others.

    Contract: sums saturate. Survives JSON and msgpack, so each process may add up its own sessions
    and send that. Reading a field that does not add up raises `AttributeError` with the reason.
    """

    sessions: int = 0

    @classmethod
    def of(cls, parts: Iterable[CacheResidencyReport | CacheResidencyTotals]) -> Self:
        """The sum of reports, or of sums."""
        totals = cls()
        for part in parts:
            totals.add(part)
        return totals

    def add(self, part: CacheResidencyReport | CacheResidencyTotals) -> None:
        """Add one session's report, or another sum."""
        instance(part, AdditiveResidency, "part")
        for name in AdditiveResidency.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(part, name))
        self.sessions += part.sessions if isinstance(part, CacheResidencyTotals) else 1

    def __getattr__(self, name: str) -> Any:
        if reason := NOT_ADDITIVE.get(name):
            raise AttributeError(
                f"{name} does not add up, {reason}: read it in each session's report"
            )
        raise AttributeError(f"{type(self).__name__} has no {name}")
