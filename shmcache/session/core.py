"""What all parts of one session share: the lock, the books, and how a change becomes known.

Why: a block is in three maps (its leases, its storage, its bytes) and a change must reach all of
them and the pool before anybody else looks. So nobody but this file writes to two of them.

Contract: every change of residency ends with `publish`. The maps have the same keys whenever the
lock is free. Nothing here waits, and all of it but `check` is called with the lock held.

Invariants: the pool shows what this session holds, or more, never less: reserve before anything
physical, publish before release.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shmcache._core import CachePoolReservation
from shmcache.errors import (
    CacheLifecycleError,
    CachePolicyError,
    CachePoolError,
    CacheResidencyError,
    CacheStorageError,
    ContractError,
    SegmentError,
)
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolUsage
from shmcache.session.backend import (
    BlockSpec,
    CacheBackend,
    HostCopy,
    HostCopyOperation,
    HostMemory,
)
from shmcache.session.layers import ModelLayers
from shmcache.session.ledger import Ledger, Peaks, Sums
from shmcache.session.locking import SessionLock
from shmcache.session.options import LiveCacheDiskPolicyEnabled, PagedCacheOptions
from shmcache.session.records import LEASED, BlockRecord, Contribution, Tail
from shmcache.session.telling import tell_levels, telling
from shmcache.session.victims import EvictionIndex
from shmcache.states.lifecycle import CacheBlockLifecycle, MutableCacheTail
from shmcache.states.storage import CacheIoOperationKey, CacheStoragePhase
from shmcache.telemetry import CacheResidencyTelemetry

if TYPE_CHECKING:
    from shmcache.session.sharing import Sharing

_P = CacheStoragePhase
_WRAPPED: dict[type[ContractError], type[CacheResidencyError]] = {
    CachePoolError: CacheResidencyError.Pool,
    CacheLifecycleError: CacheResidencyError.Lifecycle,
    CacheStorageError: CacheResidencyError.Storage,
    CachePolicyError: CacheResidencyError.Policy,
}


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    """Errors of the pieces, as errors of the session."""
    try:
        yield
    except (CachePoolError, CacheLifecycleError, CacheStorageError, CachePolicyError) as error:
        raise wrap(error) from error


def wrap(error: ContractError) -> CacheResidencyError:
    """A piece's error as the session raises it."""
    for family, variant in _WRAPPED.items():
        if isinstance(error, family):
            made: CacheResidencyError = variant(error)  # type: ignore[call-arg]
            return made
    raise error


def raise_first(errors: list[Exception]) -> None:
    """Raise what went wrong first, if anything did, once all was tried; empties the list.

    A raised error keeps the frames it came through. One that is also in a variable of such a frame
    would keep the memory of blocks until the garbage collector comes by.
    """
    if errors:
        error = errors[0]
        errors.clear()
        try:
            raise error
        finally:
            del error


class SessionCore:
    """One session, without its operations. See the module."""

    def __init__(
        self,
        pool: CacheResidencyPool,
        model: PromptCacheModelIdentity,
        options: PagedCacheOptions,
        backend: CacheBackend[Any],
        memory: HostMemory,
        session_id: int | None,
    ) -> None:
        disk = options.live_disk_policy
        queue = disk.queue_capacity if isinstance(disk, LiveCacheDiskPolicyEnabled) else 1
        self.options = options
        self.backend = backend
        self.memory = memory
        self.lifecycle = CacheBlockLifecycle()
        self.records: dict[CacheBlockId, BlockRecord] = {}
        self.busy: dict[CacheBlockId, BlockRecord] = {}  # those with a pending operation
        self._by_layer: dict[int, dict[CacheBlockId, None]] = {}
        self.tails: dict[int, Tail] = {}
        self.layer_specs: dict[int, BlockSpec] = {}
        self.ledger = Ledger()
        self.peaks = Peaks(options)
        self.published = self.sums()
        self.victims = EvictionIndex(self.lifecycle, options.eviction_policy)
        self.telemetry = CacheResidencyTelemetry(queue_capacity=queue)
        self.queue_capacity = queue
        self.generation = 0
        self.background_error: tuple[CacheIoOperationKey, str] | None = None
        self.closed = False
        self.shared: Sharing | None = None
        self.lock = SessionLock(self.recount)
        # Growth and shrinking one at a time; taken before `lock`, never by leases.
        self.order = threading.RLock()
        self._operations = 0
        self.pool = pool
        self.limits = pool.limits
        with wrapped():
            self._membership = pool.register_manager(session_id)
        self.id = self._membership.manager
        self.layers = ModelLayers(model, self.id)
        self.telling = telling(pool, self.telemetry.report)

    # Looking --------------------------------------------------------------------------------------

    def record(self, id: CacheBlockId) -> BlockRecord:
        """Errors: Lifecycle(MissingBlock)."""
        record = self.records.get(id)
        if record is None:
            raise CacheResidencyError.Lifecycle(CacheLifecycleError.MissingBlock(id))
        return record

    def end_of(self, layer: int) -> int:
        """Where the layer's next token goes."""
        books = self.lifecycle.tail(layer)
        return 0 if books is None else books.end

    def layer_ids(self, layer: int) -> list[CacheBlockId]:
        """The blocks of a layer, in the order in which they came."""
        return list(self._by_layer.get(layer, ()))

    def pending_demotion(self) -> HostCopyOperation | None:
        """The copy to the host that was begun first and has not been finished."""
        for record in self.busy.values():
            if record.storage.host_demotion is not None:
                return record.storage.host_demotion
        return None

    def sums(self) -> Sums:
        """What the session holds now."""
        return self.ledger.sums(self.records)

    def check_open(self) -> None:
        """Errors: ValueError once the session has ended."""
        if self.closed:
            raise ValueError("the session is closed")

    def check_generation(self, generation: int) -> None:
        """Errors: DiskOperationCancelled when the cache was shortened since."""
        if self.generation != generation:
            raise CacheResidencyError.DiskOperationCancelled(generation)

    # Changing -------------------------------------------------------------------------------------

    def insert(self, record: BlockRecord, protected_prefix: bool) -> None:
        """A new block. Errors: Lifecycle(DuplicateBlock, AccessClockOverflow)."""
        self.add(record)
        try:
            self.lifecycle.insert(record.id, protected_prefix)
        except CacheLifecycleError as error:
            self.drop(record)
            raise CacheResidencyError.Lifecycle(error) from error
        self.changed(record)

    def adopt(self, record: BlockRecord, protected_prefix: bool) -> None:
        """`insert` for a host copy that is a lease: it adds to no sum, and is no victim."""
        self.add(record)
        self.lifecycle.insert(record.id, protected_prefix)

    def add(self, record: BlockRecord) -> None:
        """A record that the lifecycle gets next; then comes `changed`, or `drop` if it refuses.

        The record comes first, so that `recount` finds whatever was cut short.

        Errors: Lifecycle(DuplicateBlock).
        """
        if record.id in self.records:
            raise CacheResidencyError.Lifecycle(CacheLifecycleError.DuplicateBlock(record.id))
        self.records[record.id] = record
        self._by_layer.setdefault(record.id.global_layer, {})[record.id] = None

    def drop(self, record: BlockRecord) -> None:
        """Undo `add`."""
        del self.records[record.id]
        del self._by_layer[record.id.global_layer][record.id]

    def forget(self, id: CacheBlockId) -> BlockRecord:
        """The lifecycle has lost the block; now the others lose it, too."""
        record = self.records.pop(id)
        del self._by_layer[id.global_layer][id]
        self.ledger.forget(record)
        self.victims.place(id, None)
        self.busy.pop(id, None)
        return record

    def changed(self, record: BlockRecord) -> None:
        """The block's storage has made a transition."""
        self.ledger.count(record)
        phase, tier = record.storage.phase, None
        if phase is _P.DEVICE:
            tier = CacheTier.DEVICE
        elif phase is _P.HOST_UNBACKED or phase is _P.HOST_BACKED:
            host = record.storage.host_resource
            assert host is not None
            if host.allocation is not LEASED:  # to let go of a lease frees nothing here
                tier = CacheTier.HOST
        self.victims.place(record.id, tier)
        storage = record.storage
        if storage.host_demotion is not None or storage.io is not None:
            self.busy[record.id] = record
        elif self.busy:
            self.busy.pop(record.id, None)

    def release_device_to_disk(self, record: BlockRecord) -> None:
        """Give up the device copy of a block that has a file: nothing moves."""
        record.storage.release_device_to_disk()
        self.count(record.id.global_layer, disk_demotions=1)
        self.changed(record)
        self.publish()

    def acquire(self, id: CacheBlockId) -> None:
        """One lease more. Errors: Lifecycle(...)."""
        try:
            self.lifecycle.acquire(id)
        except CacheLifecycleError as error:
            raise wrap(error) from error
        self.victims.touch(id)

    def replace(
        self,
        removals: list[tuple[CacheBlockId, int]],
        replacement: tuple[CacheBlockId, bool] | None,
        layer: int,
        tail: MutableCacheTail,
    ) -> None:
        """The lifecycle's transaction of a truncation; the caller forgets the removed blocks.

        Errors: Lifecycle(...).
        """
        with wrapped():
            self.lifecycle.replace(removals, replacement, layer, tail)

    def check_removable(self, id: CacheBlockId) -> None:
        """Errors: Lifecycle(MissingBlock, BlockLeased)."""
        self.record(id)
        if self.lifecycle.is_leased(id):
            raise CacheResidencyError.Lifecycle(CacheLifecycleError.BlockLeased(id))

    def clear_lifecycle(self) -> None:
        """All blocks and tails, or Lifecycle(BlockLeased)."""
        with wrapped():
            self.lifecycle.clear()

    def raise_background_error(self) -> None:
        """Tell once that a write failed while nobody waited for it. Errors: Runtime."""
        if self.background_error is not None:
            (_, message), self.background_error = self.background_error, None
            raise CacheResidencyError.Runtime(f"a block could not be written to disk: {message}")

    def set_tail(self, layer: int, tail: MutableCacheTail) -> MutableCacheTail | None:
        """Store a layer's tail; the one before."""
        before = self.lifecycle.set_tail(layer, tail)
        self.ledger.set_tail(layer, tail.bytes)
        return before

    def restore_tail(self, layer: int, tail: MutableCacheTail | None) -> None:
        """Undo `set_tail`."""
        self.lifecycle.restore_tail(layer, tail)
        self.ledger.set_tail(layer, 0 if tail is None else tail.bytes)

    def next_operation(self) -> int:
        """An operation id that no copy had before."""
        self._operations += 1
        return self._operations

    def recount(self) -> None:
        """Make the maps agree and count everything anew, after a change was cut short."""
        for id in list(self.records):
            try:
                self.lifecycle.lease_count(id)
            except CacheLifecycleError.MissingBlock:
                del self.records[id]
        self.ledger.restart()
        self.busy.clear()
        self._by_layer.clear()
        self.victims = EvictionIndex(self.lifecycle, self.options.eviction_policy)
        for record in self.records.values():
            record.counted = Contribution()
            self._by_layer.setdefault(record.id.global_layer, {})[record.id] = None
            self.changed(record)
        for layer, tail in self.lifecycle.tails():
            self.ledger.set_tail(layer, tail.bytes)
        if not self.closed:
            self.publish()

    # Telling --------------------------------------------------------------------------------------

    def publish(self, handover: CachePoolReservation | None = None) -> CachePoolUsage:
        """Tell the pool what is held; what all sessions hold.

        `handover` is released in the same step: its charge has become part of what is published.

        Errors: Pool(...).
        """
        sums = self.published = self.sums()
        self.peaks.see(sums)
        tell_levels(self.telling, sums)
        try:
            if handover is None:
                return self.pool.update_manager(self.id, sums.usage())
            return self.pool.publish_and_release(self.id, sums.usage(), handover)
        except CachePoolError as error:
            raise CacheResidencyError.Pool(error) from error

    def allocate(self, record: BlockRecord) -> HostCopy:
        """Host memory for a block. Errors: Pool, where allocating is the admission."""
        try:
            return self.memory.allocate(record.id, record.spec)
        except CachePoolError as error:
            raise CacheResidencyError.Pool(error) from error

    def ready(self, record: BlockRecord) -> HostCopy | None:
        """A host copy that exists already because the block is shared, or None."""
        return None if self.shared is None else self.shared.ready(record)

    def reserve(self, *, host: int = 0, transfer: int = 0, disk: int = 0) -> CachePoolReservation:
        """Admission to the pool. Errors: Pool(BudgetExceeded)."""
        usage = CachePoolUsage(0, host, transfer, disk)
        with wrapped():
            return self.pool.reserve(usage)

    def count(self, layer: int | None, **amounts: int) -> None:
        """Count events, in the report and in the row of their layer."""
        report = self.telemetry.report
        row = (
            self.telemetry.unassigned_activity_mut()
            if layer is None
            else self.telemetry.layer_activity_mut(layer)
        )
        for name, amount in amounts.items():
            setattr(report, name, getattr(report, name) + amount)
            setattr(row, name, getattr(row, name) + amount)
        self.telling.count()

    def end(self, disk_bytes: int = 0) -> None:
        """Let go of all memory, then leave the pool; not with files that could not be deleted.

        Those stay charged, in this session's name, until the process leaves the pool: then whoever
        sweeps deletes them first.
        """
        for id in list(self.records):
            self.forget(id)
        self.tails.clear()
        self.telling.end()
        if disk_bytes:
            with contextlib.suppress(CachePoolError, SegmentError):  # of a pool that has ended
                self.pool.update_manager(self.id, CachePoolUsage(disk_bytes=disk_bytes))
                self.pool.keep_membership(self._membership)
                return
        self._membership.release()
