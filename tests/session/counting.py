"""The sums of a session's books, counted anew from every block: what they must always equal."""

from __future__ import annotations

from shmcache.session.core import SessionCore
from shmcache.session.ledger import Sums
from shmcache.states.storage import CacheStoragePhase as Phase

ON_DEVICE = (Phase.DEVICE, Phase.DEMOTING_TO_HOST)
ON_HOST = (Phase.HOST_UNBACKED, Phase.HOST_WRITING, Phase.HOST_BACKED)
RESERVED = (Phase.DEMOTING_TO_HOST, Phase.DISK_READING)


def recounted(core: SessionCore) -> Sums:
    """As contract/residency.md B1 words it, block by block; for private host memory."""
    device = sum(tail.bytes for _, tail in core.lifecycle.tails())
    host = write = demotion = disk = imported = 0
    for record in core.records.values():
        storage, phase = record.storage, record.storage.phase
        if phase in ON_DEVICE:
            device += record.logical_bytes
        if phase in ON_HOST:
            assert storage.host_resource is not None
            host += storage.host_resource.capacity_bytes
        if phase in RESERVED:
            host += record.pending.bound
        if phase is Phase.DEMOTING_TO_HOST:
            demotion += record.pending.transfer
        if storage.backing is not None:
            if not storage.backing.persistent:
                disk += record.logical_bytes
            elif phase.tier.value == "disk":
                imported += record.logical_bytes
    for key, reservation in core.ledger.writes.items():
        owner = core.records.get(key.id)
        write += reservation.transfer_bytes
        waiting = owner is not None and owner.storage.io_matches(key)
        kept = owner is not None and owner.storage.host_resource is not None
        if not waiting and not kept:
            host += reservation.allocation.capacity_bytes
        if owner is None or owner.storage.backing is None:
            disk += reservation.logical_bytes
    for number, retiring in core.ledger.retiring_demotions.items():
        owner = core.records.get(retiring.operation.block_id)
        pending = None if owner is None else owner.storage.host_demotion
        if pending is None or pending.operation_id != number:
            device += retiring.device_bytes
            host += retiring.pending.bound
            demotion += retiring.pending.transfer
    host += sum(read.pending.bound for read in core.ledger.retiring_reads.values())
    return Sums(device, host, host, write, demotion, disk, imported)
