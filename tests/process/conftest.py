"""Fixtures of the process tests: the compiled probe, small pools, a parent; and what they need."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache import CacheResidencyPool
from shmcache.pool.names import segment_path
from tests.process import kernel
from tests.process.probe import compile_package, compile_probe
from tests.process.scenes import FORKS, LIMITS
from tests.support import Worker

RUN = f"test-{os.getpid()}-"  # as in the fixtures of all tests: names of this run

needs_namespaces = pytest.mark.skipif(
    not kernel.can_unshare(kernel.NEW_MOUNTS, kernel.NEW_PIDS),
    reason="this user may not make pid and mount namespaces (needs root)",
)
needs_filters = pytest.mark.skipif(
    not kernel.can_refuse_calls(), reason="system call numbers of this machine are not known here"
)

needs_mounts = pytest.mark.skipif(
    not kernel.can_unshare(kernel.NEW_MOUNTS),
    reason="this user may not make mount namespaces (needs root)",
)


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled probe with the engine as it is."""
    return compile_probe(tmp_path_factory.mktemp("probe") / "probe")


@pytest.fixture(scope="session")
def plain_lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shmcache whose waits for the lock have no end: the mutant of every slice."""
    return compile_package(tmp_path_factory.mktemp("plain"), "-DSHMC_MUTANT_PLAIN_LOCK")


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    """A small named pool; `pool.name` lets others attach. Removed afterwards."""
    with CacheResidencyPool.create(pool_name, LIMITS) as pool:
        yield pool


@pytest.fixture
def path(pool: CacheResidencyPool) -> Path:
    """The file of `pool`."""
    return segment_path(pool.name)


@pytest.fixture
def parent(pool: CacheResidencyPool) -> Iterator[Worker]:
    """An attached worker that holds 10 device bytes, and knows how to fork."""
    with Worker(FORKS) as worker:
        worker.call("attach(name)", name=pool.name)
        yield worker
