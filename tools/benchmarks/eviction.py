"""Hit rates of the eviction policies on recorded requests: one worker, one block a reference.

The traces are not part of the project: without them this benchmark has no rows.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from rows import Row

import shmcache as sc
from shmcache.workloads.traces import open_trace

_TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
_CAPACITIES = (1_000, 2_500, 5_000, 10_000, 20_000)
_BLOCK_BYTES = 64  # what a block holds does not matter here


def run() -> list[Row]:
    """All rows; needs about half a minute."""
    rows = []
    for path in sorted(_TRACES.glob("mooncake_*.jsonl.gz")):
        with open_trace(path) as reader:
            requests = [request.block_ids for request in reader]
        for capacity in _CAPACITIES:
            lru = _hits(requests, capacity, "lru")
            for policy in ("lfu", "adaptive"):
                rows.append(_row(path, capacity, policy, _hits(requests, capacity, policy), lru))
            rows.append(_row(path, capacity, "lru", lru, lru))
    if not rows:
        sys.stderr.write(f"no traces in {_TRACES}\n")
    return rows


def _row(path: Path, capacity: int, policy: str, rate: float, lru: float) -> Row:
    trace = path.name.removeprefix("mooncake_").removesuffix(".jsonl.gz")
    what = f"{trace}, {capacity:,} blocks: {policy}"
    return Row(what, 100 * rate, "%", f"lru ({100 * lru:.2f} %)", rate / lru)


def _hits(requests: list[tuple[int, ...]], capacity: int, policy: str) -> float:
    """Part of all block references that were hits."""
    arena_bytes = max(capacity * _BLOCK_BYTES, 64 << 10)
    limits = sc.CachePoolLimits(1, 2 * arena_bytes, 1, 0)
    options = {"blocks_max": capacity, "block_bytes_max": _BLOCK_BYTES, "eviction": policy}
    hits = references = 0
    with sc.CacheResidencyPool(limits, arena_bytes=arena_bytes, **options) as pool:
        for blocks in requests:
            keys = [(block + 1).to_bytes(8, "little") * 4 for block in blocks]
            references += len(keys)
            with pool.match(keys) as run:
                hits += len(run)
                _store(pool, keys[len(run) :], run)
    return hits / references


def _store(pool: sc.CacheResidencyPool, keys: list[bytes], run: sc.LeaseRun) -> None:
    """Publish what is missing, from parent to child, and lease it all meanwhile."""
    parent: sc.Lease | sc.LeaseRun = run
    with contextlib.ExitStack() as leases, contextlib.suppress(sc.SegmentError.ArenaFull):
        for key in keys:
            parent = leases.enter_context(
                pool.allocate(_BLOCK_BYTES).publish(key, parent=parent).lease
            )
