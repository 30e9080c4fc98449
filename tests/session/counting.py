"""The sums of a session's books, counted anew from every block: what they must always equal."""

from __future__ import annotations

from shmcache.session.backend import HostAllocation
from shmcache.session.core import SessionCore
from shmcache.session.ledger import Sums
from shmcache.session.records import Pending
from shmcache.states.storage import CacheStoragePhase as Phase

ON_DEVICE = (Phase.DEVICE, Phase.DEMOTING_TO_HOST)
ON_HOST = (Phase.HOST_UNBACKED, Phase.HOST_WRITING, Phase.HOST_BACKED)
RESERVED = (Phase.DEMOTING_TO_HOST, Phase.DISK_READING)


def recounted(core: SessionCore) -> Sums:
    """As contract/residency.md B1 words it, block by block; host memory once per allocation."""
    device = sum(tail.bytes for _, tail in core.lifecycle.tails())
    write = demotion = disk = imported = 0
    held: set[HostAllocation] = set()
    pendings: list[Pending] = [read.pending for read in core.ledger.retiring_reads.values()]
    for record in core.records.values():
        storage, phase = record.storage, record.storage.phase
        if phase in ON_DEVICE:
            device += record.logical_bytes
        if phase in ON_HOST:
            assert storage.host_resource is not None
            held.add(storage.host_resource.allocation)
        if phase in RESERVED:
            pendings.append(record.pending)
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
        held.add(reservation.allocation)
        if owner is None or owner.storage.backing is None:
            disk += reservation.logical_bytes
    for number, retiring in core.ledger.retiring_demotions.items():
        owner = core.records.get(retiring.operation.block_id)
        pending = None if owner is None else owner.storage.host_demotion
        if pending is None or pending.operation_id != number:
            device += retiring.device_bytes
            demotion += retiring.pending.transfer
            pendings.append(retiring.pending)
    held |= {pending.target for pending in pendings if pending.target is not None}
    bound = sum(pending.bound for pending in pendings)
    host = bound + sum(allocation.capacity_bytes for allocation in held)
    charge = bound + sum(allocation.charge_bytes for allocation in held)
    return Sums(device, host, charge, write, demotion, disk, imported)
