"""Small named pools: what the tests of names, files and endings have in common."""

from pathlib import Path

from shmcache import CachePoolLimits, CachePoolUsage, CacheResidencyPool
from shmcache.pool.names import SHM_DIRECTORY, TEMPORARY_PREFIX

LIMITS = CachePoolLimits(10, 10, 10, 10)
SMALL = {"owners_max": 8, "managers_max": 4, "reservations_max": 4}
ONE = CachePoolUsage(host_bytes=1)

# The beginning of a worker.
ATTACH = """
from shmcache import *
from tests.pool.named import *

def attach(name):
    global pool
    pool = CacheResidencyPool.attach(name)
    return pool.id
"""


def create(name: str) -> CacheResidencyPool:
    """Make it."""
    return CacheResidencyPool.create(name, LIMITS, **SMALL)


def open_or_create(name: str) -> CacheResidencyPool:
    """Attach to it, or make it."""
    return CacheResidencyPool.open_or_create(name, LIMITS, **SMALL)


def temporaries(pid: int) -> list[Path]:
    """Files that this process was building."""
    return list(SHM_DIRECTORY.glob(f"{TEMPORARY_PREFIX}{pid}.*"))
