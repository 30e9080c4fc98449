"""Fixtures of the process tests: the compiled probe, and pools of a handy size."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmcache
from shmcache.pool.names import segment_path
from tests.process.probe import compile_package, compile_probe

RUN = f"test-{os.getpid()}-"  # as in the fixtures of all tests: names of this run
LIMITS = shmcache.CachePoolLimits(1000, 0, 1000, 1000)


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled probe with the engine as it is."""
    return compile_probe(tmp_path_factory.mktemp("probe") / "probe")


@pytest.fixture(scope="session")
def plain_lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shmcache whose waits for the lock have no end: the mutant of every slice."""
    return compile_package(tmp_path_factory.mktemp("plain"), "-DSHMC_MUTANT_PLAIN_LOCK")


@pytest.fixture
def pool(pool_name: str) -> Iterator[shmcache.CacheResidencyPool]:
    """A small named pool; `pool.name` lets others attach. Removed afterwards."""
    with shmcache.CacheResidencyPool.create(pool_name, LIMITS) as pool:
        yield pool


@pytest.fixture
def path(pool: shmcache.CacheResidencyPool) -> Path:
    """The file of `pool`."""
    return segment_path(pool.name)
