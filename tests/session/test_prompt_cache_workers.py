"""Worker processes that load one prompt cache: read once, held once, whoever dies meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache import CacheResidencyPool, inspect_prompt_cache
from shmcache.pool.values import CachePoolLimits
from tests.session.prompt_engine import BLOCK, FLAT, Engine, saved
from tests.support import Worker

WORKER = """
import os
from pathlib import Path
from shmcache import CacheResidencyPool, PromptCacheReader
from tests.session.prompt_engine import *

def attach(name):
    global engine
    engine = Engine(FLAT, CacheResidencyPool.attach(name))

def count_payloads():
    global payloads
    payloads = []
    real = PromptCacheReader.read
    def read(self, entry, into=None):
        if into is not None:
            payloads.append(entry.shard)
        return real(self, entry, into)
    PromptCacheReader.read = read

def load(cache, count):
    global session
    session = engine.load(Path(cache), count)
    engine.check(session, count)
    return payloads

def stop_at(number):
    "Announces the read of that number, and never comes back from it."
    import signal
    real = PromptCacheReader.read
    def read(self, entry, into=None):
        if len(payloads) == number:
            tell("reading", payloads)
            signal.pause()
        return real(self, entry, into)
    PromptCacheReader.read = read
"""


@pytest.fixture
def named(pool_name: str) -> Iterator[CacheResidencyPool]:
    limits = CachePoolLimits(1 << 20, 1 << 22, 1 << 20, 1 << 20)
    with CacheResidencyPool.create(pool_name, limits, arena_bytes=1 << 22, blocks_max=256) as made:
        yield made
    CacheResidencyPool.destroy(pool_name)


def test_eight_workers_read_the_files_once_and_hold_the_bytes_once(
    named: CacheResidencyPool, tmp_path: Path
) -> None:
    """One of them is killed in the middle of a block, with its claim."""
    cache = saved(Engine(FLAT, named, shares=False), tmp_path / "cache", 34)
    workers = [Worker(WORKER) for _ in range(8)]
    try:
        for worker in workers:
            worker.call("attach(name); count_payloads()", name=named.name)
        killed, *others = workers
        killed.call("stop_at(5)")
        killed.begin("load(cache, 34)", cache=str(cache))
        before = killed.expect("reading")
        assert named.arena_report().stored == 2  # whole blocks of both layers
        for worker in others:
            worker.begin("load(cache, 34)", cache=str(cache))
        killed.kill()
        read = [shard for worker in others for shard in worker.finish()]
        blocks = [b for b in inspect_prompt_cache(cache).blocks if b.end % BLOCK == 0]
        assert sorted(read + before[:4]) == sorted(block.shard for block in blocks)
        arena = named.arena_report()
        assert (arena.stored, arena.duplicates, arena.used_blocks) == (8, 0, 8)
        assert named.report().current_host_bytes == arena.used_bytes
        assert arena.private_bytes == 0
        assert not named.verify().problems
        with Engine(FLAT, named).load(cache, 34) as session:
            assert session.sharing_report().published == 0
    finally:
        for worker in workers:
            worker.close()
    named.sweep()


def test_a_loader_that_stands_still_is_not_waited_for_forever(
    named: CacheResidencyPool, tmp_path: Path
) -> None:
    cache = saved(Engine(FLAT, named, shares=False), tmp_path / "cache")
    with Worker(WORKER) as standing:
        standing.call("attach(name); count_payloads(); stop_at(3)", name=named.name)
        standing.begin("load(cache, 18)", cache=str(cache))
        standing.expect("reading")
        engine = Engine(FLAT, named)
        with engine.load(cache, 18, timeout=0) as session:
            engine.check(session, 18)
            assert os.path.exists(f"/proc/{standing.pid}")
    named.sweep()
