"""Workers killed with files on disk: nothing leaks, no byte is ever there without its charge."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits
from tests.session.rig import axes, left_in
from tests.support import Worker, wait_until

LIMITS = CachePoolLimits(1 << 20, 1 << 20, 1 << 22, 1 << 20)

LIVING = """
import os, random, threading
from shmcache import *
from tests.prompt import tracing
from tests.session.rig import *

def live(name, places, seed, steps):
    'Sessions in each place that write and drop files, until it is killed or has done its steps.'
    with CacheResidencyPool.attach(name) as pool:
        rng = random.Random(seed)
        sessions = [make(disk=(Path(place), 1 << 16), pool=pool, recent=1) for place in places]
        for _ in range(steps):
            session = rng.choice(sessions)
            if len(session.blocks()) > 6:
                session.truncate(0, rng.randrange(session.position(0)))
            grow(session, rng.randrange(1, 9))
            for id in session.blocks()[: rng.randrange(4)]:
                for _ in range(2):
                    try:
                        session.demote(id)
                    except ContractError:
                        pass
            if rng.random() < 0.05:
                sessions.remove(session)
                session.close()
                sessions.append(make(disk=(Path(rng.choice(places)), 1 << 16), pool=pool))
        for session in sessions:
            session.close()
"""

PUBLISHING = """
import os
from shmcache import *
from tests.prompt import tracing
from shmcache.prompt.live import write_live_block
import numpy

id = CacheBlockId(session_id=7, global_layer=0, start=0, end=4, rank=None,
                  representation=CacheRepresentation.KEY_VALUE)
kept = []

def publish(name, place, ends):
    'As a session does: list, make, charge, write; and take it all away again.'
    pool = CacheResidencyPool.attach(name)
    live = pool.live_directory(place)
    member = pool.register_manager(None)
    pool.update_manager(member.manager, CachePoolUsage(1, 2, 3, 40))
    file = write_live_block(live.path, id, {"keys": numpy.arange(4)})
    if not ends:
        kept.append((pool, live, member))
        return
    os.unlink(file.path)
    pool.update_manager(member.manager, CachePoolUsage(1, 2, 3, 0))
    live.close()
    pool.close()

def state(name, place):
    'Files, directories, and the disk charge; observed without a sweep.'
    with CacheResidencyPool.observe(name) as pool:
        files = [file for _, _, names in os.walk(place) for file in names]
        return files, os.listdir(place), pool.report().current_disk_bytes

def sweep(name):
    with CacheResidencyPool.observe(name) as pool:
        pool.sweep()

def killed_publishers(name, place):
    'Kill one before each of its calls; how often what was left.'
    found, nth = {}, 0
    while True:
        killed = tracing.killed_before(nth, lambda: publish(name, place, True))
        files, directories, charged = state(name, place)
        assert not files or charged, (nth, files)
        found[len(files), len(directories)] = found.get((len(files), len(directories)), 0) + 1
        sweep(name)
        assert state(name, place) == ([], [], 0), nth
        if not killed:
            return nth, [[*key, count] for key, count in found.items()]
        nth += 1

def killed_sweepers(name, place):
    'Kill each who sweeps before each of its calls; how often files were left.'
    left, nth = [0, 0], 0
    while True:
        pid = os.fork()
        if pid == 0:
            for _ in range(3):
                publish(name, place, False)
            os._exit(0)
        os.waitpid(pid, 0)
        assert len(state(name, place)[0]) == 3
        killed = tracing.killed_before(nth, lambda: sweep(name))
        files, directories, charged = state(name, place)
        assert not directories or charged, (nth, directories)
        left[bool(directories)] += 1
        sweep(name)
        assert state(name, place) == ([], [], 0), nth
        if not killed:
            return nth, left
        nth += 1
"""


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=0) as pool:
        yield pool


def directories(folder: Path) -> list[str]:
    """What is below the places."""
    return [name for place in folder.iterdir() for name in os.listdir(place)]


@pytest.mark.parametrize("swept_by", ["later", "meanwhile"])
def test_workers_killed_at_any_moment(
    pool: CacheResidencyPool, tmp_path: Path, rng: random.Random, swept_by: str
) -> None:
    """Sessions of several workers share places; each worker is killed in the middle, or ends."""
    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()
    kills = 0
    for _ in range(4):
        with ExitStack() as alive:
            workers = [alive.enter_context(Worker(LIVING)) for _ in range(2)]
            for worker in workers:
                chosen = [str(place) for place in rng.sample(places, 2)]
                worker.begin(
                    "live(name, places, seed, steps)",
                    name=pool.name,
                    places=chosen,
                    seed=rng.getrandbits(32),
                    steps=10_000,
                )
            wait_until(lambda: len(left_in(tmp_path)) > 4, "files are there")
            for worker in workers:
                for _ in range(rng.randrange(200)):
                    pool.report()
                worker.kill()
                kills += 1
                if left_in(tmp_path) and swept_by == "later":
                    assert pool.report().current_disk_bytes
                elif swept_by == "meanwhile":
                    pool.sweep()
        pool.sweep()
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert directories(tmp_path) == []
    assert kills == 8
    assert pool.verify().ok


def test_a_worker_that_ends_leaves_nothing(pool: CacheResidencyPool, tmp_path: Path) -> None:
    with Worker(LIVING) as worker:
        worker.call("live(name, [place], 1, 60)", name=pool.name, place=str(tmp_path))
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert os.listdir(tmp_path) == []


@pytest.fixture
def murderer(pool: CacheResidencyPool) -> Iterator[Worker]:
    with Worker(PUBLISHING) as worker:
        if not worker.call("tracing.can_trace()"):
            pytest.skip("ptrace is not permitted here: no process can be stepped")
        yield worker


def test_a_publisher_is_killed_before_every_call(
    pool: CacheResidencyPool, tmp_path: Path, murderer: Worker
) -> None:
    calls, found = murderer.call(
        "killed_publishers(name, place)", name=pool.name, place=str(tmp_path)
    )
    kinds = {(files, directories) for files, directories, _ in found}
    assert kinds == {(0, 0), (0, 1), (1, 1), (2, 1)}, "staged, both names, published"
    assert calls > 20
    assert pool.verify().ok


def test_a_sweeper_is_killed_before_every_call(
    pool: CacheResidencyPool, tmp_path: Path, murderer: Worker
) -> None:
    calls, (nothing, something) = murderer.call(
        "killed_sweepers(name, place)", name=pool.name, place=str(tmp_path)
    )
    assert calls > 20
    assert nothing >= 2
    assert something > 10
    assert pool.verify().ok
