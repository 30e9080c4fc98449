"""Hit rates of the eviction policies on recorded requests: one worker, one block a reference.

The traces are not part of the project: without them this benchmark has no rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rows import Row

from shmcache.workloads.hit_curve import engine_hit_rate
from shmcache.workloads.traces import open_trace

_TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
_CAPACITIES = (1_000, 2_500, 5_000, 10_000, 20_000)


def run() -> list[Row]:
    """All rows; needs about half a minute."""
    rows = []
    for path in sorted(_TRACES.glob("mooncake_*.jsonl.gz")):
        with open_trace(path) as reader:
            requests = [request.block_ids for request in reader]
        for capacity in _CAPACITIES:
            lru = engine_hit_rate(requests, capacity, "lru")
            for policy in ("lfu", "adaptive"):
                rows.append(
                    _row(path, capacity, policy, engine_hit_rate(requests, capacity, policy), lru)
                )
            rows.append(_row(path, capacity, "lru", lru, lru))
    if not rows:
        sys.stderr.write(f"no traces in {_TRACES}\n")
    return rows


def _row(path: Path, capacity: int, policy: str, rate: float, lru: float) -> Row:
    trace = path.name.removeprefix("mooncake_").removesuffix(".jsonl.gz")
    what = f"{trace}, {capacity:,} blocks: {policy}"
    return Row(what, 100 * rate, "%", f"lru ({100 * lru:.2f} %)", rate / lru)
