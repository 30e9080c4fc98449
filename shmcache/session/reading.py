"""Leases: a block is on the device, and stays there, for as long as somebody reads it.

Why: attention reads a block for microseconds, but the block may be anywhere. A lease brings it,
makes room for it, and keeps both its place and the charge of its transfer until it is released.

Contract: contract/residency.md B6. Every wait is without the lock, and afterwards everything is
looked at again: the generation, the phase, the pending operation.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex

from shmcache._core import CachePoolReservation
from shmcache.errors import (
    CacheLifecycleError,
    CachePoolError,
    CacheResidencyError,
    ContractError,
)
from shmcache.io import CacheIoSubmission
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.pool.values import CachePoolResource
from shmcache.session.backend import HostCopy
from shmcache.session.balance import Balance, Step, is_refusal
from shmcache.session.core import SessionCore
from shmcache.session.demotions import Demotions
from shmcache.session.disk import DiskTier
from shmcache.session.records import IDLE, BlockRecord, Pending
from shmcache.states.storage import CacheHostPromotion, CacheStoragePhase

_P = CacheStoragePhase


class CacheBlockLease:
    """The right to read one block, made by `CacheSession.lease`.

    Contract: `arrays` may be read until `release`; they must not be changed. `release` is
    idempotent and raises nothing; leaving `with` and dropping the lease release it too, the latter
    without waiting for anything.
    """

    __slots__ = ("__weakref__", "_arrays", "_held", "_id", "_reader")

    def __init__(
        self,
        reader: Reader,
        id: CacheBlockId,
        arrays: tuple[Any, ...],
        token: CachePoolReservation | None,
    ) -> None:
        self._reader = reader
        self._id = id
        self._arrays = arrays
        self._held = [token]  # who pops it is the one who releases

    @property
    def id(self) -> CacheBlockId:
        """The block."""
        return self._id

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Its arrays. Errors: ValueError after the release."""
        if not self._held:
            raise ValueError("the lease is released")
        return self._arrays

    @property
    def released(self) -> bool:
        """Whether it was released, or consumed by a truncation."""
        return not self._held

    def release(self) -> None:
        """Give the block free; over-budget tiers are brought back under their budgets."""
        for token in self._take():
            self._reader.release(self._id, token)

    def consume(self) -> None:
        """The lifecycle has used the lease up: there is nothing to release but the transfer."""
        for token in self._take():
            if token is not None:
                token.release()

    def give_up(self) -> None:
        """Release it with the lock held, without making room for anybody."""
        for token in self._take():
            self._reader.let_go(self._id, token)

    def __del__(self) -> None:
        for token in self._take():
            self._reader.drop(self._id, token)

    def _take(self) -> list[CachePoolReservation | None]:
        """What there is to release, once over all callers."""
        try:
            token = self._held.pop()
        except (IndexError, AttributeError):  # released; or never made
            return []
        self._arrays = ()
        return [token]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a CacheBlockLease is one-of-a-kind: it cannot be copied or pickled")


class Reader:
    """See the module."""

    def __init__(
        self, core: SessionCore, demotions: Demotions, disk: DiskTier, balance: Balance
    ) -> None:
        self._core = core
        self._demotions = demotions
        self._disk = disk
        self._balance = balance

    # Taking ---------------------------------------------------------------------------------------

    def lease(self, id: CacheBlockId) -> CacheBlockLease:
        """Bring the block to the device, unless it is there, and keep it.

        Errors: Lifecycle(MissingBlock), DiskOperationCancelled, BudgetExceeded, LiveDiskRequired,
        Pool, Runtime, IoExecution; without any effect but the counters and moved blocks.
        """
        core = self._core
        started_ns = time.monotonic_ns()
        generation, from_disk = None, False
        while True:
            with core.lock:
                core.check_open()
                if generation is None:
                    record, generation = core.record(id), core.generation
                core.check_generation(generation)
                storage = record.storage
                phase = storage.phase
                arrays = self._readable(record)
                if arrays is not None:
                    lease = self._hit(record, arrays, started_ns)
                    step = self._look_for(lease)
                pending, io = storage.host_demotion, storage.io
            if arrays is not None:
                if step is not None:
                    self._make_room(lease, step, generation)
                return lease
            if pending is not None:
                self._demotions.finish(pending)
            elif phase is _P.HOST_WRITING and io is not None:
                self._disk.wait_write(io.ticket)
            elif phase is _P.DISK_READING and io is not None:
                with core.lock:
                    core.count(id.global_layer, in_flight_waits=1)
                self._disk.apply_read(io.ticket, record)
                from_disk = True
            elif phase is _P.DISK_READY:
                from_disk = self._read(record, generation) or from_disk
            else:
                promoted = self._promote(record, generation, from_disk, started_ns)
                if promoted is not None:
                    return promoted

    def _readable(self, record: BlockRecord) -> tuple[Any, ...] | None:
        """What attention can read as it is; None when the block must be brought first."""
        storage, backend = record.storage, self._core.backend
        phase = storage.phase
        if phase is _P.DEVICE:
            if storage.device_resource is None:
                raise CacheResidencyError.MissingResidentArrays(record.id)
            return storage.device_resource
        if backend.reads_host and (phase is _P.HOST_UNBACKED or phase is _P.HOST_BACKED):
            assert storage.host_resource is not None
            return tuple(backend.host_view(array) for array in storage.host_resource.arrays)
        return None

    def _hit(
        self, record: BlockRecord, arrays: tuple[Any, ...], started_ns: int
    ) -> CacheBlockLease:
        self._core.acquire(record.id)
        waited_ns = time.monotonic_ns() - started_ns
        self._core.count(record.id.global_layer, demand_hits=1, transfer_wait=waited_ns)
        return CacheBlockLease(self, record.id, arrays, None)

    def _look_for(self, lease: CacheBlockLease) -> Step | None:
        """What must be done now that the block is demanded, with the lock held."""
        try:
            return self._balance.glance(lease.id, allow_recent=True)
        except BaseException:
            lease.give_up()
            raise

    def _make_room(self, lease: CacheBlockLease, step: Step, generation: int) -> None:
        try:
            self._balance.go_on(step, lease.id, allow_recent=True)
            with self._core.lock:
                self._core.check_generation(generation)
        except BaseException:
            with self._core.lock:
                lease.give_up()
            raise

    # From the host --------------------------------------------------------------------------------

    def _promote(
        self, record: BlockRecord, generation: int, from_disk: bool, started_ns: int
    ) -> CacheBlockLease | None:
        """Copy the block to the device; None when somebody else moved it meanwhile."""
        core, id = self._core, record.id
        with core.lock:
            core.check_generation(generation)
            host = record.storage.host_resource
            if host is None or record.storage.phase is _P.HOST_WRITING:
                return None
            token = core.reserve(transfer=host.transfer_bytes)
            try:
                copy = core.backend.copy_to_device(id, host)
                core.acquire(id)
            except BaseException:
                token.release()
                raise
        try:
            arrays = copy.wait()
        except BaseException as error:
            self._drop_promotion(record, token, failed=isinstance(error, Exception))
            if isinstance(error, Exception):
                message = str(error) or type(error).__name__
                raise CacheResidencyError.Runtime(
                    f"the copy of a block to the device failed: {message}"
                ) from error
            raise
        del copy
        with core.lock:
            if record.storage.host_resource is not host or core.records.get(id) is not record:
                self.let_go(id, token)
                return None
            promotion = record.storage.promote_host(arrays)
            moved = {"disk_promotions" if from_disk else "host_promotions": 1}
            core.count(
                id.global_layer,
                demand_misses=1,
                transfer_bytes=record.logical_bytes,
                transfer_wait=time.monotonic_ns() - started_ns,
                **moved,
            )
            core.changed(record)
            core.publish()
        del host
        return self._settle_promotion(record, promotion, arrays, token, generation)

    def _settle_promotion(
        self,
        record: BlockRecord,
        promotion: CacheHostPromotion[HostCopy],
        arrays: tuple[Any, ...],
        token: CachePoolReservation,
        generation: int,
    ) -> CacheBlockLease:
        """Make room for the block, or put it back where it was."""
        core = self._core
        try:
            self._balance.restore(record.id, allow_recent=True)
            with core.lock:
                core.check_generation(generation)
        except BaseException:
            with core.lock:
                self.let_go(record.id, token)
                same = core.generation == generation
                if same and not core.closed and record.storage.phase is _P.DEVICE:
                    record.storage.restore_host(promotion)
                    core.changed(record)
                    core.publish()
            raise
        return CacheBlockLease(self, record.id, arrays, token)

    def _drop_promotion(
        self, record: BlockRecord, token: CachePoolReservation, *, failed: bool
    ) -> None:
        with self._core.lock:
            self.let_go(record.id, token)
            if failed:
                self._core.count(record.id.global_layer, failures=1)

    # From the disk --------------------------------------------------------------------------------

    def _read(self, record: BlockRecord, generation: int) -> bool:
        """Bring the block to the host; False when there was something else to do first."""
        core, disk = self._core, self._disk
        bound = core.memory.bound(record.id, record.spec)
        refusal: CachePoolError | None = None
        with core.lock:
            core.check_generation(generation)
            if record.storage.phase is not _P.DISK_READY:
                return False
            fits = self._balance.host_fits(bound)
            if fits:
                try:
                    begun, token = self._begin_read(record, bound)
                except CacheResidencyError.Pool as error:
                    refusal = copy.copy(error.error)  # which keeps no frame alive
        if not fits or refusal is not None:
            self._balance.free_host(bound, record.id, refusal)
            return False
        if not isinstance(begun, CacheIoSubmission):
            disk.retire([begun])
            return False
        with token:
            disk.enqueue_read(begun, record)
            disk.apply_read(begun.ticket, record)
        return True

    def _begin_read(self, record: BlockRecord, bound: int) -> tuple[Any, CachePoolReservation]:
        """With the lock held: admitted, allocated, prepared and published.

        Errors: Pool.
        """
        core = self._core
        reserved = 0 if core.memory.admits else bound
        with core.reserve(host=reserved) as admitted:
            token = core.reserve(transfer=record.logical_bytes)
            try:
                host = core.allocate(record)
                target = host.allocation if core.memory.admits else None
                record.pending = Pending(reserved, 0, target)
                begun = self._disk.begin_read(record, host)
                if isinstance(begun, CacheIoSubmission):
                    core.publish(admitted)
                    return begun, token
                record.pending = IDLE
                token.release()
                return begun, token
            except BaseException:
                record.pending = IDLE
                self._disk.undo_read(record)
                token.release()
                raise

    # Giving back ----------------------------------------------------------------------------------

    def release(self, id: CacheBlockId, token: CachePoolReservation | None) -> None:
        """An explicit release: then make room where something is over."""
        core = self._core
        if core.lock.is_foreign:
            return
        try:
            with core.lock:
                self._forget(id)
                quiet = core.background_error is None and not core.closed
                step = self._balance.glance(None) if quiet else None
            if step is not None:
                self._balance.go_on(step, None)
        except (ContractError, ValueError):
            pass  # it is counted; whoever adds bytes next is told
        finally:
            if token is not None:
                token.release()

    def drop(self, id: CacheBlockId, token: CachePoolReservation | None) -> None:
        """The release of a lease that was dropped; from a finalizer."""
        self._core.lock.later(lambda: self.let_go(id, token))

    def let_go(self, id: CacheBlockId, token: CachePoolReservation | None) -> None:
        """End a lease, with the lock held."""
        self._forget(id)
        if token is not None:
            token.release()

    def _forget(self, id: CacheBlockId) -> None:
        """A block that has gone took its leases along."""
        try:
            self._core.lifecycle.release(id)
        except (CacheLifecycleError.MissingBlock, CacheLifecycleError.LeaseUnderflow):
            return
        self._core.victims.touch(id)

    # Several --------------------------------------------------------------------------------------

    def visible(self, layer: int, start: int, end: int) -> list[CacheBlockId]:
        """The sealed blocks of a layer that positions from `start` up to `end` see, in order."""
        core = self._core
        representation = core.layers[layer].representation
        prefix = core.layers.prefix_tokens
        with core.lock:
            core.check_open()
            seen = [
                id
                for id in core.layer_ids(layer)
                if id.representation is representation
                and id.start < end
                and (id.end > start or id.start < prefix)
            ]
        return sorted(seen, key=lambda id: (id.start, id.end))

    def window(self, ids: list[CacheBlockId]) -> Iterator[CacheBlockLease]:
        """Each block in turn, and the next one brought while the present one is read.

        Contract: a lease is released when the next one is asked for. With room for a single block
        it is one at a time.
        """
        held: list[CacheBlockLease] = []
        try:
            for position, id in enumerate(ids):
                if not held:
                    held.append(self.lease(id))
                if position + 1 < len(ids):
                    held.extend(self._look_ahead(id, ids[position + 1]))
                yield held[0]
                held.pop(0).release()
        finally:
            for lease in held:
                lease.release()

    def _look_ahead(self, id: CacheBlockId, following: CacheBlockId) -> list[CacheBlockLease]:
        core = self._core
        with core.lock:
            both = core.record(id).logical_bytes + core.record(following).logical_bytes
            both += core.ledger.tail_bytes
        if both > core.options.device_budget_bytes:
            return []
        try:
            return [self.lease(following)]
        except CacheResidencyError.BudgetExceeded as error:
            if error.tier is not CacheTier.DEVICE:
                raise
            return []
        except CacheResidencyError.Pool as error:
            if not is_refusal(error.error, CachePoolResource.DEVICE):
                raise
            return []
