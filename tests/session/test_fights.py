"""Sessions of several threads and processes at once, with slow and failing copies and disks."""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits
from tests.session.counting import recounted
from tests.session.fighting import (
    Trouble,
    open_session,
    read_steps,
    trouble_with_files,
    write_steps,
)
from tests.session.rig import axes, elsewhere, left_in, peaks, shared_pool
from tests.support import Worker, wait_until

LIMITS = CachePoolLimits(1500, 1500, 1500, 6000)
LONG = 3000  # steps in which somebody adopts what another has computed
ARENA_LIMITS = CachePoolLimits(1500, 64 << 10, 1500, 6000)


def test_threads_of_one_session(tmp_path: Path, seed: int) -> None:
    trouble = Trouble(seed)
    restore = trouble_with_files(trouble)
    try:
        with shared_pool() as pool:
            session = open_session(pool, tmp_path, trouble, device=600, host=300)
            with ExitStack() as running:
                writers = [
                    running.enter_context(
                        elsewhere(lambda: write_steps(session, random.Random(seed), 200))
                    )
                ]
                readers = [
                    running.enter_context(
                        elsewhere(partial(read_steps, session, random.Random(seed + n), 200))
                    )
                    for n in (1, 2)
                ]
            for answers in (*writers, *readers):
                assert isinstance(answers[0], int), answers
            assert writers[0][0] > 50  # type: ignore[operator]
            trouble.calm()
            core = session._core
            with core.lock:
                assert core.sums() == recounted(core)
                assert axes(pool.report())[0] == core.sums().device
            session.close()
            assert axes(pool.report()) == (0, 0, 0, 0)
            assert left_in(tmp_path) == []
    finally:
        restore()


def fight_in_processes(
    pool_name: str, folder: Path, seed: int, *, memory: str, workers: int, steps: int
) -> None:
    """The last worker is killed in the middle; the others never notice."""
    limits = LIMITS if memory == "private" else ARENA_LIMITS
    arena_bytes = 0 if memory == "private" else limits.host_bytes
    blocks = {"blocks_max": 64} if memory == "shared" else {}
    adopted = 0
    with (
        CacheResidencyPool.create(pool_name, limits, arena_bytes=arena_bytes, **blocks) as pool,
        ExitStack() as alive,
    ):
        fighters = [
            alive.enter_context(Worker("from tests.session.fighting import enter"))
            for _ in range(workers)
        ]
        for number, worker in enumerate(fighters):
            worker.begin(
                "enter(name, folder, seed, steps, share)",
                name=pool_name,
                folder=str(folder / str(number)),
                seed=seed + number,
                share=memory == "shared",
                steps=steps * (100 if number == workers - 1 else 1),
            )
        victim = fighters.pop()
        wait_until(lambda: left_in(folder / str(workers - 1)), "the victim has files")
        victim.kill()
        for worker in fighters:
            write, read, matched = worker.finish()
            adopted += matched
            assert write > steps // 10
            assert read > steps // 10
        pool.sweep()
        assert (adopted > 0) <= (memory == "shared")
        assert adopted > 0 or memory != "shared" or steps < LONG
        if arena_bytes:  # what was published stays, and is nobody's
            assert pool.arena_report().private_bytes == pool.arena_report().leased_bytes == 0
            pool.evict(arena_bytes)
        report = pool.report()
        assert axes(report) == (0, 0, 0, 0)
        assert report.managers == 0
        assert all(
            peak <= limit
            for peak, limit in zip(
                peaks(report),
                (
                    limits.device_bytes,
                    limits.host_bytes,
                    limits.transfer_in_flight_bytes,
                    limits.disk_bytes,
                ),
                strict=True,
            )
        )
        assert pool.verify().problems == ()
        assert left_in(folder) == []  # those of the killed one neither
        assert [list(place.iterdir()) for place in folder.iterdir()] == [[]] * workers


@pytest.mark.parametrize("memory", ["private", "arena", "shared"])
def test_processes_fight_for_one_pool(
    pool_name: str, tmp_path: Path, seed: int, memory: str
) -> None:
    fight_in_processes(pool_name, tmp_path, seed, memory=memory, workers=3, steps=120)


@pytest.mark.ci
@pytest.mark.parametrize("memory", ["private", "arena", "shared"])
def test_processes_fight_for_one_pool_at_length(
    pool_name: str, tmp_path: Path, seed: int, memory: str
) -> None:
    fight_in_processes(pool_name, tmp_path, seed, memory=memory, workers=4, steps=LONG)
