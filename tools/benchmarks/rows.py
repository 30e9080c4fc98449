"""What a benchmark measures: a figure, beside the peer it is compared with in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec


class Row(msgspec.Struct, frozen=True):
    """`ratio` is the figure divided by the peer's; what is wanted stands in `target`."""

    name: str
    value: float
    unit: str
    peer: str = ""
    ratio: float | None = None
    target: str = ""


def median_ns(call: Callable[[], object], *, calls: int, rounds: int = 9) -> float:
    """Median over rounds of the nanoseconds per call. A round is long enough to hide the clock."""
    results = []
    for _ in range(rounds):
        started_ns = time.perf_counter_ns()
        for _ in range(calls):
            call()
        results.append((time.perf_counter_ns() - started_ns) / calls)
    return statistics.median(results)


def percentile(values: list[float], percent: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
