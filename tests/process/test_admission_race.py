"""Processes that race for the last bytes never get more than there is.

Goal: G1 and G2 under full-speed contention. Method: four processes reserve and release random sizes
around the limits of a small pool; an observer outside audits all the time; every admission counts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

import shmcache as sc
from tests.support import Worker

LIMITS = sc.CachePoolLimits(1000, 900, 800, 700)


def race(name: str, admissions: int, seed: int) -> dict[str, int]:
    """Admit that often, holding up to eight at once; returns what happened."""
    rng = random.Random(seed)
    pool = sc.CacheResidencyPool.attach(name)
    sizes = [sc.CachePoolUsage(*(rng.randrange(400) for _ in range(4))) for _ in range(64)]
    sizes += [sc.CachePoolUsage(host_bytes=rng.randrange(900)) for _ in range(64)]
    held: list[Any] = []
    admitted = refused = 0
    while admitted < admissions:
        for usage in rng.sample(sizes, 32):
            try:
                held.append(pool.reserve(usage))
                admitted += 1
            except sc.CachePoolError.BudgetExceeded as error:
                if error.required <= error.budget:
                    raise
                refused += 1
                if held:
                    held.pop(rng.randrange(len(held))).release()
            if len(held) > 8:
                held.pop(0).release()
    for token in held:
        token.release()
    return {"admitted": admitted, "refused": refused}


def audit(pool: sc.CacheResidencyPool) -> None:
    """No axis above its limit, and a recount that equals the totals."""
    report = pool.report()
    assert report.current_device_bytes <= LIMITS.device_bytes
    assert report.current_host_bytes <= LIMITS.host_bytes
    assert report.current_transfer_in_flight_bytes <= LIMITS.transfer_in_flight_bytes
    assert report.current_disk_bytes <= LIMITS.disk_bytes
    assert pool.verify().ok


def run_race(name: str, total: int, seed: int) -> tuple[int, int]:
    """Four processes race; returns admissions and audits."""
    sc.CacheResidencyPool.create(name, LIMITS, arena_bytes=0).close()
    audits = 0
    with contextlib.ExitStack() as stack:
        observer = stack.enter_context(sc.CacheResidencyPool.observe(name))
        setup = "import random, shmcache as sc; from typing import Any"
        workers = [stack.enter_context(Worker(setup, race)) for _ in range(4)]
        for number, worker in enumerate(workers):
            order = "race(name, admissions, seed)"
            worker.begin(order, name=name, admissions=total // 4, seed=seed + number)
        outcomes = []
        for worker in workers:
            while not worker.answered():
                audit(observer)
                audits += 1
            outcomes.append(worker.finish())
        for worker in workers:
            worker.kill()
        observer.sweep()
        audit(observer)
        assert observer.report().current_host_bytes == 0
        assert observer.owners() == ()
        assert all(outcome["refused"] for outcome in outcomes), "nothing was contended"
        return sum(outcome["admitted"] for outcome in outcomes), audits


def test_racing_processes_never_exceed_a_limit(pool_name: str, seed: int) -> None:
    """The short form."""
    admitted, audits = run_race(pool_name, 40_000, seed)
    assert admitted >= 40_000
    assert audits >= 10


@pytest.mark.ci
def test_a_million_admissions(
    pool_name: str, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """The long form: 10^6 admissions over four processes."""
    admitted, audits = run_race(pool_name, 1_000_000, seed)
    record_property("admissions", admitted)
    record_property("audits", audits)
    assert admitted >= 1_000_000
    assert audits >= 100
