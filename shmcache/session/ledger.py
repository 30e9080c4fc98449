"""What a session holds on each axis, kept as sums so that nobody counts all blocks again.

Why: usage is published after every change. Each block remembers what it last added; a change
subtracts that and adds what is true now. What outlives its block (writes, copies of an older
generation) is few and summed when asked.

Contract: the sums are those of contract/residency.md B1. Host memory is counted by allocation,
once, however many copies lie in it.

Concurrency: the session's lock guards it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shmcache.policy.identity import CacheBlockId
from shmcache.pool.values import CachePoolUsage
from shmcache.session.backend import HostAllocation
from shmcache.session.options import PagedCacheOptions
from shmcache.session.records import (
    BlockRecord,
    Contribution,
    RetiringDemotion,
    RetiringRead,
    WriteReservation,
)
from shmcache.states.storage import CacheIoOperationKey, CacheStoragePhase

_P = CacheStoragePhase


class Sums(NamedTuple):
    """The session at one instant.

    `host` is measured against its budget, `host_charge` is published. `imported`: bytes that rest
    in files of prompt caches, which are nobody's charge.
    """

    device: int
    host: int
    host_charge: int
    write: int
    demotion: int
    disk: int
    imported: int

    def usage(self) -> CachePoolUsage:
        """What the pool is told."""
        return CachePoolUsage(self.device, self.host_charge, self.write + self.demotion, self.disk)


class Peaks:
    """The largest levels so far; of the first three, those within their budgets.

    Why: a level above its budget is taken back, and would be a peak that nobody was granted.
    """

    def __init__(self, options: PagedCacheOptions) -> None:
        self._device_budget = options.device_budget_bytes
        self._host_budget = options.host_budget_bytes
        self._disk_budget = options.disk_budget_bytes
        self.device = self.host = self.disk = self.write = self.demotion = 0

    def see(self, sums: Sums) -> None:
        """A level that was published."""
        if self.device < sums.device <= self._device_budget:
            self.device = sums.device
        if self.host < sums.host <= self._host_budget:
            self.host = sums.host
        disk = sums.disk + sums.imported
        if self.disk < disk and (self._disk_budget is None or disk <= self._disk_budget):
            self.disk = disk
        if self.write < sums.write:
            self.write = sums.write
        if self.demotion < sums.demotion:
            self.demotion = sums.demotion


class Ledger:
    """The books of one session (see the module)."""

    def __init__(self) -> None:
        self.writes: dict[CacheIoOperationKey, WriteReservation] = {}
        self.retiring_demotions: dict[int, RetiringDemotion] = {}
        self.retiring_reads: dict[int, RetiringRead] = {}
        self._next_read = 0
        self._tails: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Forget all blocks, to count them anew."""
        self._device = sum(self._tails.values())
        self._bound = self._demotion = self._disk = self._imported = 0
        self._host = self._host_charge = 0
        self._allocations: dict[HostAllocation, int] = {}

    def set_tail(self, layer: int, nbytes: int) -> None:
        """A layer's tail now has `nbytes`."""
        self._device += nbytes - self._tails.get(layer, 0)
        self._tails[layer] = nbytes

    @property
    def tail_bytes(self) -> int:
        """Device bytes that no eviction frees."""
        return sum(self._tails.values())

    def count(self, record: BlockRecord) -> None:
        """The block's storage has changed."""
        self._replace(record, contribution(record))

    def forget(self, record: BlockRecord) -> None:
        """The block is gone."""
        self._replace(record, Contribution())

    @staticmethod
    def has_own_file(record: BlockRecord | None) -> bool:
        """Whether the block rests on a file of this session, not on one of a prompt cache."""
        backing = None if record is None else record.storage.backing
        return backing is not None and not backing.persistent

    @staticmethod
    def is_pending(operation_id: int, record: BlockRecord | None) -> bool:
        """Whether a copy to the host is still the block's own, which then counts it."""
        operation = None if record is None else record.storage.host_demotion
        return operation is not None and operation.operation_id == operation_id

    def retire_read(self, read: RetiringRead) -> int:
        """Keep it charged; the number under which it can be dropped."""
        self._next_read += 1
        self.retiring_reads[self._next_read] = read
        return self._next_read

    def sums(self, records: Mapping[CacheBlockId, BlockRecord]) -> Sums:
        """All of it, with what outlives its block."""
        if self.writes or self.retiring_demotions or self.retiring_reads:
            return self._sums_in_flight(records)
        bound = self._bound
        return Sums(
            self._device,
            self._host + bound,
            self._host_charge + bound,
            0,
            self._demotion,
            self._disk,
            self._imported,
        )

    def _sums_in_flight(self, records: Mapping[CacheBlockId, BlockRecord]) -> Sums:
        device, demotion, disk = self._device, self._demotion, self._disk
        host, charge, bound = self._host, self._host_charge, self._bound
        write, held = 0, set[HostAllocation | None]()
        for reservation in self.writes.values():
            write += reservation.transfer_bytes
            if not self.has_own_file(records.get(reservation.key.id)):
                disk += reservation.logical_bytes
            held.add(reservation.allocation)
        for number, retiring in self.retiring_demotions.items():
            if not self.is_pending(number, records.get(retiring.operation.block_id)):
                device += retiring.device_bytes
                demotion += retiring.pending.transfer
                bound += retiring.pending.bound
                held.add(retiring.pending.target)
        for read in self.retiring_reads.values():
            bound += read.pending.bound
            held.add(read.pending.target)
        for allocation in held.difference(self._allocations):
            if allocation is not None:
                host += allocation.capacity_bytes
                charge += allocation.charge_bytes
        host, charge = host + bound, charge + bound
        return Sums(device, host, charge, write, demotion, disk, self._imported)

    def _replace(self, record: BlockRecord, now: Contribution) -> None:
        before, record.counted = record.counted, now
        self._device += now.device - before.device
        self._bound += now.bound - before.bound
        self._demotion += now.demotion - before.demotion
        self._disk += now.disk - before.disk
        self._imported += now.imported - before.imported
        if now.allocation is not before.allocation:
            self._move(now.allocation, 1)
            self._move(before.allocation, -1)

    def _move(self, allocation: HostAllocation | None, step: int) -> None:
        """One copy more, or less, lies in the allocation; the first and the last one count."""
        if allocation is None:
            return
        copies = self._allocations.get(allocation, 0)
        self._allocations[allocation] = copies + step
        if not copies + step:
            del self._allocations[allocation]
        if not copies or not copies + step:
            self._host += step * allocation.capacity_bytes
            self._host_charge += step * allocation.charge_bytes


def contribution(record: BlockRecord) -> Contribution:
    """What a block adds, by its phase."""
    storage = record.storage
    phase, backing, host = storage.phase, storage.backing, storage.host_resource
    size = record.logical_bytes
    device = bound = demotion = disk = imported = 0
    allocation: HostAllocation | None = None
    if phase is _P.DEVICE:
        device = size
    elif phase is _P.DEMOTING_TO_HOST:
        device, (bound, demotion, allocation) = size, record.pending
    elif phase is _P.DISK_READING:
        bound, _, allocation = record.pending
    elif host is not None:
        allocation = host.allocation
    if backing is not None:
        if not backing.persistent:
            disk = size
        elif phase is _P.DISK_READY or phase is _P.DISK_READING:
            imported = size
    return Contribution(device, bound, demotion, disk, imported, allocation)
