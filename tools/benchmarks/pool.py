"""The pool: admission, contention, report, attach, recovery, and death to reclaim."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from engine import engine_figures
from rows import Row, median_ns, percentile

import shmcache as sc

_LIMIT = 1 << 40
_NAME = f"bench-{os.getpid()}"
_DEATHS = 60

_HAMMER = """
import sys, time
import shmcache as sc
pool = sc.CacheResidencyPool.attach(sys.argv[1])
usage = sc.CachePoolUsage(host_bytes=64)
print("ready", flush=True)
sys.stdin.readline()
calls, until = 0, time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    for _ in range(200):
        pool.reserve(usage).release()
    calls += 200
print(calls, flush=True)
"""

_VICTIM = """
import sys
import numpy as np
import shmcache as sc
pool = sc.CacheResidencyPool.attach(sys.argv[1])
touched = np.ones(max(1, int(sys.argv[2])), dtype=np.uint8)
held = [pool.reserve(sc.CachePoolUsage(host_bytes=64)) for _ in range(20)]
member = pool.register_manager(None)
print("ready", flush=True)
sys.stdin.readline()
"""


def run() -> list[Row]:
    """All rows; needs about a minute."""
    with _pool(arena_bytes=0) as pool:
        return [*_calls(pool), *_contention(), *_attach(), *_deaths(pool), *_tables()]


@contextlib.contextmanager
def _pool(name: str = _NAME, **options: int) -> Iterator[sc.CacheResidencyPool]:
    limits = sc.CachePoolLimits(_LIMIT, _LIMIT, _LIMIT, _LIMIT)
    pool = sc.CacheResidencyPool.create(name, limits, **options)
    try:
        yield pool
    finally:
        pool.close()
        sc.CacheResidencyPool.destroy(name, force=True)


# ---- one process -------------------------------------------------------------------------------


def _calls(pool: sc.CacheResidencyPool) -> list[Row]:
    usage = sc.CachePoolUsage(host_bytes=64)
    with pool.register_manager(7):
        reserve_ns = median_ns(lambda: pool.reserve(usage).release(), calls=20_000)
        update_ns = median_ns(lambda: pool.update_manager(7, usage), calls=20_000)
        combined_ns = median_ns(
            lambda: pool.publish_and_release(7, usage, pool.reserve(usage)), calls=20_000
        )
    report_ns = median_ns(pool.report, calls=20_000)
    engine = engine_figures()
    lock_ns = engine["lock_pair_ns"]
    lock = f"one lock pair in C ({lock_ns:.1f} ns)"
    recovery_ns = engine["reserve_recover_release_ns"] - engine["reserve_release_ns"]
    return [
        Row("reserve + release", reserve_ns, "ns", lock, reserve_ns / lock_ns, "300 ns, 35x"),
        Row("the same in C", engine["reserve_release_ns"], "ns", lock,
            engine["reserve_release_ns"] / lock_ns),
        Row("update_manager", update_ns, "ns", lock, update_ns / lock_ns),
        Row("reserve + publish_and_release", combined_ns, "ns", lock, combined_ns / lock_ns),
        Row("report", report_ns, "ns", lock, report_ns / lock_ns, "2,000 ns"),
        Row("recovery of one record", recovery_ns, "ns", lock, recovery_ns / lock_ns, "0.1 ms"),
    ]  # fmt: skip


# ---- two processes -----------------------------------------------------------------------------


def _hammered(processes: int, seconds: float) -> float:
    """Calls per second of all processes together."""
    hammers = [
        subprocess.Popen(
            [sys.executable, "-c", _HAMMER, _NAME, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(processes)
    ]
    for hammer in hammers:
        assert hammer.stdout is not None
        hammer.stdout.readline()
    calls = [hammer.communicate(b"go\n")[0] for hammer in hammers]
    return sum(map(int, calls)) / seconds


def _contention() -> list[Row]:
    ratios, together = [], []
    for _ in range(5):  # alternate, so that a slow moment hits both
        alone = _hammered(1, 0.5)
        together.append(_hammered(2, 0.5))
        ratios.append(together[-1] / alone)
    return [
        Row("two hammering processes", statistics.median(together), "pairs/s",
            "one alone", statistics.median(ratios), "0.5x"),
    ]  # fmt: skip


# ---- attach ------------------------------------------------------------------------------------


def _attach() -> list[Row]:
    rows = []
    for gib in (1 / 16, 1, 8):
        name = f"{_NAME}-attach"
        try:
            with _pool(name, arena_bytes=int(gib * (1 << 30))):
                attach_ns = median_ns(
                    lambda name=name: sc.CacheResidencyPool.attach(name).close(),
                    calls=20,
                    rounds=5,
                )
        except sc.SegmentError.NoSpace:
            continue
        size = f"{gib * 1024:g} MiB"
        rows.append(Row(f"attach + close, {size}", attach_ns / 1e6, "ms", target="10 ms, flat"))
    return rows


# ---- death -------------------------------------------------------------------------------------


def _deaths(pool: sc.CacheResidencyPool) -> list[Row]:
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "shmcache.cli.main", "supervise", _NAME],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        samples = [_one_death(pool, 0) for _ in range(_DEATHS)]
        reclaim = [after_report for after_report, _ in samples]
        rows = [
            Row("kernel's report to reclaim, p50", percentile(reclaim, 50), "ms", target="2 ms"),
            Row("kernel's report to reclaim, p99", percentile(reclaim, 99), "ms", target="10 ms"),
        ]
        for mib in (0, 256, 1024):
            total = statistics.median(_one_death(pool, mib << 20)[1] for _ in range(5))
            rows.append(Row(f"SIGKILL to reclaim, {mib} MiB touched", total, "ms"))
        return rows
    finally:
        supervisor.terminate()
        supervisor.wait()


def _one_death(pool: sc.CacheResidencyPool, touched_bytes: int) -> tuple[float, float]:
    """Milliseconds from the kernel's report, and from SIGKILL, until all charges are back."""
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, _NAME, str(touched_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert victim.stdout is not None
    victim.stdout.readline()
    time.sleep(0.05)  # a supervisor's turn: the owner is being watched
    pidfd = os.pidfd_open(victim.pid)
    killed = time.monotonic()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    reported = time.monotonic()
    while pool.report().current_host_bytes:
        pass
    reclaimed = time.monotonic()
    os.close(pidfd)
    victim.communicate()
    return (reclaimed - reported) * 1e3, (reclaimed - killed) * 1e3


# ---- memory ------------------------------------------------------------------------------------


def _tables() -> list[Row]:
    limits = sc.CachePoolLimits(_LIMIT, _LIMIT, _LIMIT, _LIMIT)
    small = sc.SegmentGeometry(limits=limits)
    blocks = 1 << 20
    large = sc.SegmentGeometry(limits=limits, arena_bytes=blocks << 16, blocks_max=blocks)
    overhead = large.segment_bytes - large.arena_bytes
    return [
        Row("tables without an arena", small.segment_bytes / 1024, "KiB"),
        Row("tables of 2^20 blocks, 64 owners", overhead / (1 << 20), "MiB",
            "the arena at 64 KiB blocks", overhead / large.arena_bytes, "0.0025x"),
    ]  # fmt: skip
