"""C60, C64: a publisher killed before any of its system calls, while a reader loops.

A reader finds the old content or the new one, whole, and never an error. What is left is collected,
and the next publisher needs to wait for nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import Worker

MURDER = """
import os, shutil
from shmcache import *
from tests.policy.samples import minimal
from tests.prompt import tracing
from tests.prompt.caches import expected_arrays, named, publish, read_all

def content(cache):
    'The label of what a reader finds, every byte verified; None for nothing.'
    try:
        with PromptCacheReader.open(cache) as reader:
            assert read_all(reader) == expected_arrays(minimal())
            return reader.manifest.application_namespace
    except PromptCachePersistenceError.MalformedStorage as error:
        assert error.code == "current_missing", error
        return None

def restore(cache, old):
    if content(cache) != old or prompt_cache_generations(cache)[1:]:
        shutil.rmtree(cache, ignore_errors=True)
        if old:
            publish(cache, named(old))

def murder(cache, old, prune):
    'Kill a publisher before each of its calls; how often which content was found.'
    found, nth = {}, 0
    while True:
        restore(cache, old)
        def work():
            publish(cache, named("new"), replacing=bool(old))
            if prune:
                prune_prompt_cache(cache)
        killed = tracing.killed_before(nth, work)
        after = content(cache)
        assert after in ((old, "new") if killed else ("new",)), (nth, after)
        found[after] = found.get(after, 0) + 1
        prune_prompt_cache(cache)
        assert content(cache) == after
        left = os.listdir(os.path.dirname(cache))
        assert left in ([], [os.path.basename(cache)]), (nth, left)
        if after:
            assert len(os.listdir(os.path.join(cache, ".generations"))) == 1, nth
        publish(cache, named("next"), replacing=bool(after))
        assert content(cache) == "next"
        if not killed:
            return nth, found
        nth += 1

def murder_live(folder):
    'Kill those who store a live block, before each call; how often files of which kind stayed.'
    import numpy
    from shmcache.prompt.live import read_live_block, write_live_block
    id = CacheBlockId(session_id=7, global_layer=0, start=0, end=4, rank=None,
                      representation=CacheRepresentation.KEY_VALUE)
    arrays = {"keys": numpy.arange(9), "values": numpy.arange(7)}
    whole = write_live_block(folder, id, arrays)
    kinds, nth = {}, 0
    while True:
        killed = tracing.killed_before(nth, lambda: write_live_block(folder, id, arrays))
        names = sorted(set(os.listdir(folder)) - {whole.path.name})
        kind = "".join("s" if name.startswith(".") else "d" for name in names)
        kinds[kind] = kinds.get(kind, 0) + 1
        for name in names:
            if not name.startswith("."):  # whatever has a final name is whole
                read_live_block(whole._replace(path=whole.path.with_name(name)))
            os.unlink(os.path.join(folder, name))
        if not killed:
            return kinds
        nth += 1

def murder_reversible(cache, old):
    'As murder, of one who publishes in two phases; how often which leftovers were collected.'
    found, left, nth = {}, {}, 0
    while True:
        restore(cache, old)
        def work():
            with ReversiblePromptCachePublication.begin(cache, bool(old)) as publication:
                publish(publication.transaction_directory, named("new"))
                publication.publish()
                publication.commit()
        killed = tracing.killed_before(nth, work)
        after = content(cache)
        assert after in ((old, "new") if killed else ("new",)), (nth, after)
        found[after] = found.get(after, 0) + 1
        parent = os.path.dirname(cache)
        for name in set(os.listdir(parent)) - {os.path.basename(cache)}:
            kind = ("staging" if ".tmp-" in name else "transaction")
            left[kind] = left.get(kind, 0) + 1
        prune_prompt_cache(cache)
        assert content(cache) == after
        assert os.listdir(parent) in ([], [os.path.basename(cache)]), (nth, os.listdir(parent))
        if after:
            assert len(os.listdir(os.path.join(cache, ".generations"))) == 1, nth
        if not killed:
            return nth, found, left
        nth += 1

def murder_two(cache):
    'Kill those who publish twice and prune; how often.'
    def work():
        for name in ("a", "b"):
            publish(cache, named(name), replacing=True)
            prune_prompt_cache(cache)
    kills = 0
    for nth in range(0, 400, 13):
        kills += tracing.killed_before(nth, work)
        prune_prompt_cache(cache)
    publish(cache, named("last"), replacing=True)
    return kills
"""

READER = """
from shmcache import PromptCacheReader
from tests.policy.samples import minimal
from tests.prompt.caches import expected_arrays, read_all

def loop(cache):
    'Read until the cache is labelled `last`; how often, and which labels were there.'
    labels, reads = set(), 0
    while "last" not in labels:
        with PromptCacheReader.open(cache) as reader:
            assert read_all(reader) == expected_arrays(minimal())
            labels.add(reader.manifest.application_namespace)
        reads += 1
    return reads, sorted(labels)
"""


@pytest.fixture
def murderer() -> Iterator[Worker]:
    with Worker(MURDER) as worker:
        if not worker.call("tracing.can_trace()"):
            pytest.skip("ptrace is not permitted here: no process can be stepped")
        yield worker


def killed(worker: Worker, cache: Path, old: str | None, prune: bool = False) -> None:
    cache.parent.mkdir()
    calls, found = worker.call("murder(cache, old, prune)", cache=str(cache), old=old, prune=prune)
    assert calls >= 50
    assert set(found) == {old or "null", "new"}
    assert sum(found.values()) == calls + 1
    assert min(found.values()) >= 2


@pytest.mark.parametrize("old", [None, "old"], ids=["new", "replacement"])
def test_a_publisher_is_killed_before_every_call(
    memory_path: Path, murderer: Worker, old: str | None
) -> None:
    killed(murderer, memory_path / "parent/cache", old)


def test_a_prune_is_killed_before_every_call(memory_path: Path, murderer: Worker) -> None:
    killed(murderer, memory_path / "parent/cache", "old", prune=True)


def test_a_reader_that_loops_meanwhile_sees_no_error(memory_path: Path, murderer: Worker) -> None:
    """Publishers and prunes are killed beside it."""
    cache = memory_path / "cache"
    murderer.call("publish(cache, named('old'))", cache=str(cache))
    with Worker(READER) as reader:
        reader.begin("loop(cache)", cache=str(cache))
        kills = murderer.call("murder_two(cache)", cache=str(cache))
        reads, labels = reader.finish()
    assert kills > 10
    assert reads > 10
    assert len(labels) > 1


def test_a_live_block_is_killed_before_every_call(memory_path: Path, murderer: Worker) -> None:
    """8: nothing, the staging, both names of one file, or the block: never half of one."""
    kinds = murderer.call("murder_live(folder)", folder=str(memory_path))
    assert set(kinds) == {"", "s", "sd", "d"}


@pytest.mark.parametrize("old", [None, "old"], ids=["new", "replacement"])
def test_a_publication_in_two_phases_is_killed_before_every_call(
    memory_path: Path, murderer: Worker, old: str | None
) -> None:
    cache = memory_path / "parent/cache"
    cache.parent.mkdir()
    calls, found, left = murderer.call("murder_reversible(cache, old)", cache=str(cache), old=old)
    assert calls >= 50
    assert set(found) == {old or "null", "new"}
    assert set(left) == {"staging", "transaction"}
    assert min(left.values()) >= 2
