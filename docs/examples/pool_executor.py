"""Processes of an executor that share what each of them computes.

python pool_executor.py [fork | spawn | forkserver]
"""

import hashlib
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from shmcache import CachePoolLimits, CacheResidencyPool
from shmcache.integrations.mp_workers import PoolName, current_pool, join_pool

NAME = os.environ.get("POOL", "executor-example")
LIMITS = CachePoolLimits(
    device_bytes=1, host_bytes=16 << 20, transfer_in_flight_bytes=1, disk_bytes=0
)


def features(text: str) -> np.ndarray:
    """What takes long: a vector for a text."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    return np.random.default_rng(seed).standard_normal(4096, dtype=np.float32)


def total(text: str) -> tuple[int, bool, float]:
    """The process that answered, whether it had to compute, and the answer."""
    pool = current_pool()
    key = hashlib.sha256(text.encode()).digest()
    lease = pool.lookup(key)
    computed = lease is None
    if lease is None:
        vector = features(text)
        with pool.allocate(vector.nbytes) as block:
            block.array(np.float32, 4096)[:] = vector
            lease = block.publish(key).lease
    with lease:
        return os.getpid(), computed, float(lease.array(np.float32, 4096).sum())


def main(method: str) -> None:
    """Ask 60 questions about 20 texts in 3 processes."""
    texts = [f"text {number % 20}" for number in range(60)]
    with (
        CacheResidencyPool.create(NAME, LIMITS, arena_bytes=8 << 20) as pool,
        ProcessPoolExecutor(
            3,
            mp_context=multiprocessing.get_context(method),
            initializer=join_pool,
            initargs=(PoolName.of(pool),),
        ) as executor,
    ):
        answers = list(executor.map(total, texts))
        assert [answer for *_, answer in answers] == [float(features(t).sum()) for t in texts]
        computed = sum(computed for _, computed, _ in answers)
        print(f"{len(answers)} answers, {computed} vectors computed")
        print(f"{pool.arena_report().published_bytes >> 10} KiB of blocks")
        executor.shutdown()
        print(f"owners now: {len(pool.owners())}")
    CacheResidencyPool.destroy(NAME)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fork")
