"""Words of a block's storage: its phases, the key of a read or write, what an operation must tell.

Why: these are what a backend, the I/O worker and the storage of a block say to each other. The key
names one operation so exactly that a late completion can never be taken for a newer one.

Not here: what may follow what (storage.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol

from shmcache.policy.fields import U64, Checked
from shmcache.policy.identity import CacheBlockId, CacheTier


class CacheStoragePhase(Enum):
    """Which resources of a block exist and whether an operation owns the next step.

    Contract: `tier` is where the block is accounted: one on its way still counts where it was.
    """

    DEVICE = "device"
    DEMOTING_TO_HOST = "demoting_to_host"
    HOST_UNBACKED = "host_unbacked"
    HOST_WRITING = "host_writing"
    HOST_BACKED = "host_backed"
    DISK_READY = "disk_ready"
    DISK_READING = "disk_reading"

    @property
    def tier(self) -> CacheTier:
        """The tier whose bytes the block counts in."""
        return _TIERS[self]


_TIERS: Final = {
    CacheStoragePhase.DEVICE: CacheTier.DEVICE,
    CacheStoragePhase.DEMOTING_TO_HOST: CacheTier.DEVICE,
    CacheStoragePhase.HOST_UNBACKED: CacheTier.HOST,
    CacheStoragePhase.HOST_WRITING: CacheTier.HOST,
    CacheStoragePhase.HOST_BACKED: CacheTier.HOST,
    CacheStoragePhase.DISK_READY: CacheTier.DISK,
    CacheStoragePhase.DISK_READING: CacheTier.DISK,
}


class CacheIoOperationKind(Enum):
    """WRITE makes host resources durable, READ rebuilds them from the backing."""

    WRITE = "write"
    READ = "read"


class CacheIoOperationKey(Checked, frozen=True, gc=False):
    """Names one read or write of one block; only ever compared as a whole.

    Units: `generation` is the session's at submission. The session raises it whenever blocks leave,
    so that what was begun before can no longer complete what was begun after.
    """

    generation: U64
    id: CacheBlockId
    kind: CacheIoOperationKind


class CacheHostDemotionOperation(Protocol):
    """A pending copy from device to host. Any object with these attributes, constant for life."""

    @property
    def block_id(self) -> CacheBlockId:
        """The block whose device resource it holds."""

    @property
    def operation_id(self) -> int:
        """Its identity within the backend session (u64): growing, never used again."""


class CacheIoOperation(Protocol):
    """A pending read or write. Any object with this attribute, constant for life."""

    @property
    def key(self) -> CacheIoOperationKey:
        """Which operation it is."""
