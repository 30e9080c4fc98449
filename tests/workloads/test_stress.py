"""The stress run finds nothing in a sound pool, and finds what is planted in an unsound one."""

import contextlib
import os
import random
import signal
from collections.abc import Callable

import psutil
import pytest

from shmcache import CachePoolLimits, CachePoolUsage, CacheResidencyPool, SegmentError, segment_path
from shmcache.workloads.stress import (
    StressOptions,
    StressProgress,
    StressReport,
    percentile_ms,
    run_stress,
)
from shmcache.workloads.stress_worker import StressWorker
from tests.pool.raw import CONTROL, CURRENT, Segment


def stress(
    name: str,
    seed: int,
    seconds: float,
    on_progress: Callable[[StressProgress], None] | None = None,
    *,
    kills_per_second: float = 5,
    supervisor: bool = True,
) -> StressReport:
    options = StressOptions(
        name=name,
        seed=seed,
        workers=3,
        seconds=seconds,
        kills_per_second=kills_per_second,
        supervisor=supervisor,
    )
    return run_stress(options, on_progress)


def test_nothing_is_violated_and_nothing_leaks(pool_name: str, seed: int) -> None:
    report = stress(pool_name, seed, 3)
    assert report.ok, report
    assert (report.violations, report.leaked_bytes, report.leaked_owners) == ((), 0, 0)
    assert min(report.operations, report.refusals, report.kills, report.audits) > 0
    assert report.reclaims_measured > 0
    assert report.reclaim_p50_ms is not None
    assert report.reclaim_p99_ms is not None
    assert 0 <= report.reclaim_p50_ms <= report.reclaim_p99_ms
    assert not segment_path(pool_name).exists()


def test_nothing_leaks_without_a_supervisor(pool_name: str, seed: int) -> None:
    report = stress(pool_name, seed, 1, supervisor=False, kills_per_second=10)
    assert report.ok, report
    assert report.kills > 0
    assert (report.reclaims_measured, report.reclaim_p99_ms) == (0, None)


# ---- what is planted is found ------------------------------------------------------------------


def test_a_leak_into_the_totals_is_a_violation(pool_name: str, seed: int) -> None:
    """Mutant: somebody adds to a total what no reservation and no publication accounts for."""

    def leak(at: StressProgress) -> None:
        with Segment(segment_path(pool_name)) as raw:
            for axis in range(4):
                raw.put(CONTROL, CURRENT + 8 * axis, raw.word(CONTROL, CURRENT + 8 * axis) + 4096)

    report = stress(pool_name, seed, 60, leak)
    assert not report.ok
    assert any("an axis total differs from its recount" in text for text in report.violations)
    assert report.seconds < 60  # it stops at the first finding
    assert report.leaked_bytes is None
    assert not segment_path(pool_name).exists()


def test_a_total_above_its_limit_is_a_violation(pool_name: str, seed: int) -> None:
    """Mutant: a publication of what nobody reserved, which `verify` rightly finds sound."""

    def publish(at: StressProgress) -> None:
        pool = CacheResidencyPool.attach(pool_name)
        with contextlib.suppress(SegmentError.TableFull):  # then the next time
            member = pool.register_manager(None)
            usage = CachePoolUsage(disk_bytes=pool.limits.disk_bytes + 1)
            pool.update_manager(member.manager, usage)
            published.append((pool, member))

    published: list[object] = []
    report = stress(pool_name, seed, 60, publish, kills_per_second=0)
    published.clear()
    assert report.violations
    assert all("G2" in text for text in report.violations)


def test_an_error_in_a_worker_is_a_violation(pool_name: str, seed: int) -> None:
    """Mutant: the pool ends under the workers."""

    def retire(at: StressProgress) -> None:
        if at.operations:
            CacheResidencyPool.destroy(pool_name, force=True)
            CacheResidencyPool.create(pool_name, CachePoolLimits(1, 1, 1, 1)).close()

    report = stress(pool_name, seed, 60, retire, kills_per_second=0)
    assert any("SegmentError.Retired" in text for text in report.violations)
    assert not segment_path(pool_name).exists()


@pytest.mark.parametrize("module", ["stress_worker", "stress_supervisor"])
def test_a_child_that_dies_by_itself_is_a_violation(pool_name: str, seed: int, module: str) -> None:
    def kill(at: StressProgress) -> None:
        for child in psutil.Process().children():
            if any(module in word for word in child.cmdline()):
                os.kill(child.pid, signal.SIGKILL)
                return

    report = stress(pool_name, seed, 60, kill, kills_per_second=0)
    assert any("ended with -9" in text for text in report.violations)


def test_owners_that_nobody_sweeps_are_a_leak(
    pool_name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: a sweep that does nothing, in the process that looks at what is left."""
    monkeypatch.setattr(CacheResidencyPool, "sweep", lambda self: ())
    leaked = 0
    for attempt in range(20):  # the nemesis lets all workers leave in order once in eight runs
        report = stress(pool_name, seed + attempt, 0.2, kills_per_second=1e-9, supervisor=False)
        leaked += report.leaked_owners or 0
        if leaked:
            break
    assert leaked
    assert not report.ok


# ---- parts -------------------------------------------------------------------------------------


def test_a_worker_publishes_only_what_it_has_reserved(rng: random.Random) -> None:
    """So no axis ever exceeds its limit, however full the pool is."""
    limits = CachePoolLimits(1000, 1000, 1000, 1000)
    with CacheResidencyPool(limits) as pool:
        count = memoryview(bytearray(16)).cast("Q")
        workers = [StressWorker(pool, rng, 1, count) for _ in range(3)]  # three times too many
        for step in range(5000):
            workers[step % 3].step()
            report = pool.report()
            assert max(report.current_device_bytes, report.current_disk_bytes) <= 1000
            assert max(report.current_host_bytes, report.peak_host_bytes) <= 1000
        assert count[0] == 5000
        assert 0 < count[1] < 5000
        assert pool.verify().ok


def test_percentiles_are_times_that_were_measured() -> None:
    times = [k / 1000 for k in range(1, 101)]
    random.shuffle(times)
    assert [percentile_ms(times, p) for p in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile_ms([0.007], 50) == 7.0
    assert percentile_ms([], 99) is None


def test_an_exception_of_the_callback_ends_the_run(pool_name: str, seed: int) -> None:
    """Which is how Ctrl-C ends it; the fixtures look for what is left."""

    def interrupt(at: StressProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stress(pool_name, seed, 60, interrupt)
    assert not segment_path(pool_name).exists()
