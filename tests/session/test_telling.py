"""What sessions tell through the pool: exact sums over processes, that outlive who told them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shmcache import CacheResidencyPool, CacheResidencyReport, CacheResidencyTotals
from shmcache._core import Telling
from shmcache.errors import CacheResidencyError
from shmcache.pool.values import CachePoolLimits
from shmcache.telemetry import CacheResidencyTelemetry, sample_process_of
from shmcache.telemetry.shared import SESSIONS, TOLD_COUNTERS, TOLD_GAUGES
from tests.session.rig import content, grow, make, shared_pool
from tests.support import Worker, wait_until

LIMITS = CachePoolLimits(1 << 20, 1 << 20, 1 << 22, 1 << 20)

WORKER = """
import msgspec
from shmcache import *
from tests.session.rig import *

def begin(name, place):
    global pool, session
    pool = CacheResidencyPool.attach(name)
    session = make(pool=pool, device=96, host=80, disk=(Path(place), 1 << 16))

def live(rounds):
    'Work on all tiers; what its session reports, as JSON.'
    for _ in range(rounds):
        grow(session, 12)
        content(session)
        session.truncate(0, session.position(0) - 3)
    return msgspec.json.encode(session.report()).decode()
"""


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=0) as pool:
        yield pool


@pytest.fixture
def workers(pool: CacheResidencyPool, tmp_path: Path) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as alive:
        made = [alive.enter_context(Worker(WORKER)) for _ in range(2)]
        for worker in made:
            worker.call("begin(name, place)", name=pool.name, place=str(tmp_path))
        yield made


def reported(worker: Worker, rounds: int = 3) -> CacheResidencyReport:
    text = worker.call("live(rounds)", rounds=rounds)
    return msgspec.json.decode(text, type=CacheResidencyReport)


def counters(totals: CacheResidencyTotals | CacheResidencyReport) -> dict[str, int]:
    return {name: getattr(totals, name) for name in TOLD_COUNTERS}


def gauges(totals: CacheResidencyTotals | CacheResidencyReport) -> dict[str, int]:
    return {name: getattr(totals, name) for name in TOLD_GAUGES}


def test_words_keep_their_numbers() -> None:
    """They are the segment's layout: a change raises SHMC_VERSION, and this line."""
    told = " ".join([*TOLD_COUNTERS, "|", *TOLD_GAUGES])
    assert told == (
        "host_promotions disk_promotions host_demotions disk_demotions transfer_bytes transfer_wait"
        " evictions discarded_sliding_blocks block_seals tail_allocations demand_hits demand_misses"
        " in_flight_waits queue_backpressure cancellations failures prefill_full_attention_blocks"
        " prefill_full_attention_bytes decode_full_attention_blocks decode_full_attention_bytes"
        " prompt_cache_saves prompt_cache_loads prompt_cache_bytes imported_mapped_shards |"
        " logical_cached_tokens key_value_blocks compressed_latent_blocks device_blocks host_blocks"
        " disk_blocks current_device_bytes current_host_bytes current_disk_bytes mutable_tail_bytes"
        " in_flight_write_blocks in_flight_write_bytes in_flight_host_demotion_blocks"
        " in_flight_host_demotion_bytes protected_recent_blocks protected_prefix_blocks"
        " queue_capacity"
    )
    assert SESSIONS == 17


def test_a_pool_without_sessions_tells_nothing(pool: CacheResidencyPool) -> None:
    assert pool.telemetry() == CacheResidencyTotals()


def test_one_process_tells_the_sum_of_its_sessions(tmp_path: Path) -> None:
    """Every field is exact once each session was asked; bytes and counters always are."""
    with shared_pool() as pool:
        one = make(pool=pool, device=96, host=80, disk=(tmp_path, 1 << 16))
        other = make(pool=pool, device=64)
        for session in (one, other):
            grow(session, 20)
            content(session)
        levels = pool.telemetry()
        expected = CacheResidencyTotals.of([one.report(), other.report()])
        assert expected.demand_misses > 0
        assert expected.disk_demotions > 0
        assert counters(levels) == counters(expected)
        for name in ("current_device_bytes", "current_host_bytes", "current_disk_bytes"):
            assert getattr(levels, name) == getattr(expected, name) > 0, name
        assert pool.telemetry() == expected
        other.close()
        assert pool.telemetry().sessions == 1
        assert gauges(pool.telemetry()) == gauges(one.report())
        one.close()
        after = pool.telemetry()
        assert after.sessions == 0
        assert set(gauges(after).values()) == {0}
        assert all(counters(after)[name] >= counters(expected)[name] for name in TOLD_COUNTERS)


def test_a_growth_that_is_taken_back_is_not_told_twice() -> None:
    with shared_pool() as pool, make(pool=pool, device=16) as session:
        for _ in range(3):
            with pytest.raises(CacheResidencyError.BudgetExceeded):
                grow(session, 3)
        grow(session, 1)
        assert session.report().tail_allocations == 1
        assert pool.telemetry().tail_allocations == 1


def test_processes_add_up_and_the_dead_keep_their_counts(
    pool: CacheResidencyPool, workers: list[Worker], tmp_path: Path
) -> None:
    first, second = (reported(worker) for worker in workers)
    expected = CacheResidencyTotals.of([first, second])
    assert pool.telemetry() == expected
    with CacheResidencyPool.observe(pool.name) as observer:
        assert observer.telemetry() == expected
    workers[0].kill()
    assert counters(pool.telemetry()) == counters(expected)
    pool.sweep()
    left = pool.telemetry()
    assert counters(left) == counters(expected), "what was done is done"
    assert gauges(left) == gauges(second), "what was there is gone"
    assert left.sessions == 1
    with Worker(WORKER) as successor:  # in the slot of the dead
        successor.call("begin(name, place)", name=pool.name, place=str(tmp_path))
        third = reported(successor)
        assert counters(pool.telemetry()) == counters(CacheResidencyTotals.of([expected, third]))
        assert gauges(pool.telemetry()) == gauges(CacheResidencyTotals.of([second, third]))
        assert pool.telemetry().sessions == 2


def test_counters_never_go_back(pool: CacheResidencyPool, tmp_path: Path) -> None:
    """Seen by somebody who looks all the time, while workers come and are killed and swept."""
    before = counters(pool.telemetry())
    slots = set()
    for _ in range(4):
        with Worker(WORKER) as worker:
            worker.call("begin(name, place)", name=pool.name, place=str(tmp_path))
            worker.begin("live(100_000)")
            goal = before["block_seals"] + 20
            while before["block_seals"] < goal:
                now = counters(pool.telemetry())
                assert all(now[name] >= before[name] for name in now)
                before = now
            slots |= {owner.slot for owner in pool.owners() if owner.pid == worker.pid}
            worker.kill()
        while pool.telemetry().sessions:
            now = counters(pool.telemetry())
            assert all(now[name] >= before[name] for name in now)
            before = now
            pool.sweep()
        assert set(gauges(pool.telemetry()).values()) == {0}
    assert len(slots) == 1, "one row had them all"


def test_a_forked_child_tells_nothing_of_its_parent_s(pool: CacheResidencyPool) -> None:
    with make(pool=pool) as session:
        grow(session, 4)
        before = pool.telemetry()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                session._core.telemetry.report.block_seals += 100
                session._core.telling.count()
                session._core.telling.end()
                with make(pool=pool) as own:
                    grow(own, 4)
                    assert pool.telemetry().sessions == 2
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        pool.sweep()
        assert pool.telemetry().sessions == 1
        assert pool.telemetry().block_seals == before.block_seals + 1


def test_a_closed_pool_is_told_nothing(pool: CacheResidencyPool) -> None:
    with CacheResidencyPool.attach(pool.name) as leaver:
        session = make(pool=leaver)
        grow(session, 5)
        assert pool.telemetry().sessions == 1
    assert pool.telemetry().sessions == 0
    assert pool.telemetry().current_device_bytes == 0
    with contextlib.suppress(Exception):
        session.close()
    session._core.telling.end()
    assert pool.telemetry().sessions == 0
    assert pool.telemetry().block_seals == 1


def test_a_row_has_so_many_words(pool: CacheResidencyPool) -> None:
    report = CacheResidencyTelemetry().report
    with pytest.raises(ValueError, match="not so many"):
        Telling(pool, report, ["evictions"] * 33, [])
    with pytest.raises(ValueError, match="not so many"):
        Telling(pool, report, [], ["disk_blocks"] * 25)
    with pytest.raises(AttributeError):
        Telling(pool, report, ["nothing"], [])
    with pytest.raises(TypeError):
        Telling(pool, report, ["__init__"], [])
    telling = Telling(pool, report, [], [])
    for gauge in (-1, 24):
        with pytest.raises(IndexError):
            telling.stand(gauge, 1)


# ---- processes -----------------------------------------------------------------------------------


def test_processes_are_looked_at(pool: CacheResidencyPool, workers: list[Worker]) -> None:
    found: dict[int, Any] = {sample.pid: sample for sample in pool.processes()}
    assert set(found) == {os.getpid(), *(worker.pid for worker in workers)}
    assert all(sample.rss_bytes > 1 << 20 for sample in found.values())
    assert all(sample.minor_page_faults > 100 for sample in found.values())
    before = found[workers[0].pid]
    workers[0].call("kept = bytearray(os.urandom(1 << 24))")
    after = {sample.pid: sample for sample in pool.processes()}[workers[0].pid]
    assert after.rss_bytes > before.rss_bytes + (1 << 23)
    assert after.minor_page_faults > before.minor_page_faults
    workers[0].kill()
    wait_until(lambda: len(pool.processes()) == 2, "the dead have no memory")


def test_a_pid_that_was_used_again_is_another_process() -> None:
    assert sample_process_of(os.getpid()) is not None
    assert sample_process_of(os.getpid(), 1) is None
    assert sample_process_of(1 << 22) is None
