"""Publishers, readers and prunes of one cache at once, each a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmcache import inspect_prompt_cache, prompt_cache_generations, prune_prompt_cache
from tests.support import Worker

CODE = """
import os
from shmcache import *
from tests.policy.samples import hybrid, minimal
from tests.prompt.caches import expected_arrays, named, publish, read_all

def replace_often(cache, name, rounds):
    'Every publication succeeds; then this process says so in a file.'
    for k in range(rounds):
        publish(cache, named(f"{name} {k}"), replacing=True)
    open(f"{cache}.done-{name}", "x").close()

def read_until_done(cache, publishers):
    'How many reads, and how many different contents. Each is whole and as published.'
    reads, labels = 0, set()
    while sum(os.path.exists(f"{cache}.done-{k}") for k in range(publishers)) < publishers:
        with PromptCacheReader.open(cache) as reader:
            assert read_all(reader) == expected_arrays(minimal())
            label = reader.manifest.application_namespace
        assert inspect_prompt_cache(cache).application_namespace
        labels.add(label)
        reads += 1
    return reads, len(labels)

def prune_until_done(cache, publishers):
    removed = 0
    while sum(os.path.exists(f"{cache}.done-{k}") for k in range(publishers)) < publishers:
        removed += len(prune_prompt_cache(cache))
        prompt_cache_generations(cache)
    return removed

def publish_new(cache, name):
    'Whether it was the one that got the name.'
    try:
        publish(cache, named(name))
    except PromptCachePersistenceError.PromptCacheExists:
        return "exists"
    except PromptCachePersistenceError.Io as error:
        return error.action
    return "won"
"""


@pytest.mark.parametrize("rounds", [40, pytest.param(3000, marks=pytest.mark.ci)])
def test_publishers_readers_and_prunes(memory_path: Path, rounds: int) -> None:
    cache = memory_path / "cache"
    workers = [Worker(CODE) for _ in range(5)]
    try:
        workers[0].call("publish(cache, named('first'))", cache=str(cache))
        for k in (0, 1):
            workers[k].begin(
                "replace_often(cache, name, rounds)", cache=str(cache), name=str(k), rounds=rounds
            )
        for k in (2, 3):
            workers[k].begin("read_until_done(cache, 2)", cache=str(cache))
        workers[4].begin("prune_until_done(cache, 2)", cache=str(cache))
        answers = [worker.finish(limit_s=110) for worker in workers]
    finally:
        for worker in workers:
            worker.close()
    for reads, labels in answers[2:4]:
        assert reads >= 5
        assert labels >= 2
    assert answers[4] > 0
    prune_prompt_cache(cache)
    assert len(prompt_cache_generations(cache)) == 1
    label = inspect_prompt_cache(cache).application_namespace
    assert label in (f"0 {rounds - 1}", f"1 {rounds - 1}")


def test_one_new_publication_wins(memory_path: Path) -> None:
    """7.6, with processes: nobody's half survives beside the winner's whole."""
    with Worker(CODE) as one, Worker(CODE) as two:
        for k in range(25):
            cache = memory_path / f"cache-{k}"
            for worker, name in ((one, "one"), (two, "two")):
                worker.begin("publish_new(cache, name)", cache=str(cache), name=name)
            said = [one.finish(), two.finish()]
            assert said.count("won") == 1, said
            assert set(said) <= {"won", "exists", "publish_cache"}
            winner = ("one", "two")[said.index("won")]
            assert inspect_prompt_cache(cache).application_namespace == winner
    assert sorted(os.listdir(memory_path)) == sorted(f"cache-{k}" for k in range(25))
