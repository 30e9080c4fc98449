"""Workers of a torch DataLoader that read blocks from a pool.

python data_loader.py [fork | spawn | forkserver]
"""

import os
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shmcache import CachePoolLimits, CacheResidencyPool
from shmcache.integrations.mp_workers import PoolName

NAME = os.environ.get("POOL", "loader-example")
LIMITS = CachePoolLimits(
    device_bytes=1, host_bytes=16 << 20, transfer_in_flight_bytes=1, disk_bytes=0
)
SAMPLES, SHAPE = 64, (128, 32)


def key_of(index: int) -> bytes:
    """The name of a sample's block."""
    return index.to_bytes(32)


class Samples(Dataset):
    """Tensors over the pool's memory. Pickled with the pool's name, so any start method will do."""

    def __init__(self, pool_name: PoolName) -> None:
        self.pool_name = pool_name

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        lease = self.pool_name.pool().lookup(key_of(index))
        if lease is None:
            raise LookupError(f"sample {index} was evicted")  # or make it again
        # No copy: the tensor keeps the lease, until it was collated into a batch.
        return torch.from_dlpack(lease.array(np.float32, SHAPE))


def store_all(pool: CacheResidencyPool) -> None:
    """What another process would do while this one trains."""
    for index in range(SAMPLES):
        with pool.allocate(int(np.prod(SHAPE)) * 4) as block:
            block.array(np.float32, SHAPE)[:] = index
            block.publish(key_of(index)).lease.release()


def main(method: str) -> None:
    """Two epochs over all samples, in two workers that live through both."""
    with CacheResidencyPool.create(NAME, LIMITS, arena_bytes=8 << 20) as pool:
        store_all(pool)
        loader = DataLoader(
            Samples(PoolName.of(pool)),
            batch_size=8,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context=method,
        )
        for epoch in range(2):
            batches = list(loader)
            assert torch.equal(torch.cat(batches)[:, 0, 0], torch.arange(SAMPLES).float())
            print(f"epoch {epoch}: {len(batches)} batches of {tuple(batches[0].shape)}")
        print(f"owners: {len(pool.owners())}, leased: {pool.arena_report().leased_bytes} bytes")
        del loader
        print(f"owners now: {len(pool.owners())}")
    CacheResidencyPool.destroy(NAME)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fork")
