"""Storages for tests: their operations, each phase reached by public calls, what a phase holds."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from shmcache.policy.identity import CacheBlockId
from shmcache.states.storage import (
    CacheBlockStorage,
    CacheHostPromotion,
    CacheIoOperationKey,
    CacheIoOperationKind,
    CacheStoragePhase,
)
from tests.states.blocks import block

P = CacheStoragePhase
WRITE, READ = CacheIoOperationKind.WRITE, CacheIoOperationKind.READ
X = block(4, 64, 96)
FOREIGN = block(5, 64, 96)


class Demotion(NamedTuple):
    """Inherits nothing of ours: the attributes qualify it (S9)."""

    operation_id: int
    block_id: CacheBlockId = X


class Io(NamedTuple):
    """As `Demotion`."""

    key: CacheIoOperationKey


Storage: TypeAlias = CacheBlockStorage[object, object, object, Demotion, Io]
Promotion: TypeAlias = CacheHostPromotion[object]


def write(generation: int, id: CacheBlockId = X) -> CacheIoOperationKey:
    """The key written write@generation in the examples."""
    return CacheIoOperationKey(generation, id, WRITE)


def read(generation: int, id: CacheBlockId = X) -> CacheIoOperationKey:
    """The key written read@generation in the examples."""
    return CacheIoOperationKey(generation, id, READ)


# Which of device, host, backing, host_demotion, io a phase fills; "?" may be filled.
SLOTS = {
    P.DEVICE: "D.?..",
    P.DEMOTING_TO_HOST: "D..d.",
    P.HOST_UNBACKED: ".H...",
    P.HOST_WRITING: ".H..w",
    P.HOST_BACKED: ".HB..",
    P.DISK_READY: "..B..",
    P.DISK_READING: "..B.r",
}


def slots(storage: Storage) -> tuple[object, ...]:
    """The five slots, in the order of `SLOTS`."""
    return (
        storage.device_resource,
        storage.host_resource,
        storage.backing,
        storage.host_demotion,
        storage.io,
    )


def check_slots(storage: Storage) -> None:
    """The slots are those of the phase, an operation belongs to the block, the tier is right."""
    for mark, value in zip(SLOTS[storage.phase], slots(storage), strict=True):
        assert mark == "?" or (value is not None) == (mark != "."), storage.phase
    if storage.io is not None:
        assert storage.io.key.kind is (WRITE if storage.phase is P.HOST_WRITING else READ)
        assert storage.io.key.id == storage.id
    if storage.host_demotion is not None:
        assert storage.host_demotion.block_id == storage.id
    tier = {"D": "device", "H": "host", ".": "disk"}
    assert storage.tier.value == tier["".join(SLOTS[storage.phase][:2]).strip(".") or "."]


# The columns of the contract's matrix, each reached by public calls.
COLUMNS = (
    "DEVICE no backing",
    "DEVICE backed",
    "DEMOTING",
    "HOST_UNBACKED",
    "HOST_WRITING",
    "HOST_BACKED",
    "DISK_READY",
    "DISK_READING",
)
DEMOTION = Demotion(310)
WRITING = Io(write(12))
READING = Io(read(12))


def storage_in(column: str) -> Storage:
    """A storage of X with resources "d", "h" and "f", and the operations above."""
    if column in ("DEVICE no backing", "DEMOTING"):
        storage = Storage.device(X, "d")
        if column == "DEMOTING":
            storage.begin_host_demotion(DEMOTION)
    elif column == "DEVICE backed":
        storage = Storage.device(X, "d", "f")
    elif column in ("HOST_UNBACKED", "HOST_WRITING"):
        storage = Storage.host(X, "h")
        if column == "HOST_WRITING":
            storage.begin_write(WRITING)
    elif column == "HOST_BACKED":
        storage = Storage.host(X, "h", "f")
    else:
        storage = Storage.disk(X, "f")
        if column == "DISK_READING":
            storage.begin_read(READING)
    return storage


def promotion_from(source: CacheStoragePhase) -> Promotion:
    """A promotion of X by another storage, whose host resource is "p"."""
    return Storage.host(X, "p", None if source is P.HOST_UNBACKED else "f").promote_host("d")
