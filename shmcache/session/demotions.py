"""Device to host: a copy that holds both memories until it is known to be good.

Why: the device copy is freed only when the host has the bytes, so a failed copy costs nothing. The
host memory is admitted before it is allocated, by its upper bound, and handed from the reservation
to the published usage in one step.
"""

from __future__ import annotations

import time

from shmcache.errors import CacheLifecycleError, CacheResidencyError, CacheStorageError
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.session.backend import HostCopy, HostCopyOperation
from shmcache.session.core import SessionCore
from shmcache.session.records import IDLE, BlockRecord, Pending
from shmcache.states.storage import CacheStoragePhase


class Demotions:
    """See the module."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core

    def begin(self, id: CacheBlockId) -> HostCopyOperation | None:
        """Start the copy, with the lock held; None when the host had the block already.

        Errors: Lifecycle(BlockLeased, MissingBlock), Storage, BudgetExceeded(HOST), Pool.
        """
        core = self._core
        record = core.record(id)
        self._check_idle(record)
        ready = core.ready(record)
        if ready is not None:
            self.take_ready(record, ready)
            core.publish()
            return None
        bound = core.memory.bound(id, record.spec)
        held, budget = core.sums().host, core.options.host_budget_bytes
        if held + bound > budget:
            raise CacheResidencyError.BudgetExceeded(CacheTier.HOST, held + bound, budget)
        reserved = 0 if core.memory.admits else bound
        transfer = core.memory.transfer_bytes(record.spec)
        with core.reserve(host=reserved, transfer=transfer) as admitted:
            host = core.allocate(record)
            arrays = record.storage.device_resource
            assert arrays is not None
            number = core.next_operation()
            operation = core.backend.copy_to_host(id, number, arrays, host)
            target = host.allocation if core.memory.admits else None
            record.pending = Pending(reserved, transfer, target)
            record.storage.begin_host_demotion(operation)
            core.changed(record)
            try:
                core.publish(admitted)
            except CacheResidencyError:
                record.storage.fail_host_demotion(number)
                record.pending = IDLE
                core.changed(record)
                raise
        return operation

    def finish(self, operation: HostCopyOperation) -> None:
        """Wait for the copy, without the lock, and take it over if the block still wants it.

        Errors: Runtime when the copy failed; the block is on the device as before.
        """
        started_ns = time.monotonic_ns()
        failure: str | None = None
        host: HostCopy | None = None
        try:
            host = operation.wait()
        except Exception as error:  # noqa: BLE001 (backends raise what they like)
            failure = str(error) or type(error).__name__
        core = self._core
        with core.lock:
            record = core.records.get(operation.block_id)
            if record is None or not _waits_for(record, operation):
                return
            waited_ns = time.monotonic_ns() - started_ns
            layer = record.id.global_layer
            core.count(layer, in_flight_waits=1, transfer_wait=waited_ns)
            if host is not None and _exceeds(host, record.pending):
                bound = record.pending.bound
                failure = f"the copy took {host.capacity_bytes} bytes of {bound} reserved"
            if failure is not None:
                record.storage.fail_host_demotion(operation.operation_id)
                core.count(layer, failures=1)
            else:
                assert host is not None
                record.storage.finish_host_demotion(operation.operation_id, host)
                core.count(layer, host_demotions=1, transfer_bytes=record.logical_bytes)
            record.pending = IDLE
            core.changed(record)
            core.publish()
        if failure is not None:
            raise CacheResidencyError.Runtime(f"the copy of a block to the host failed: {failure}")

    def _check_idle(self, record: BlockRecord) -> None:
        """Errors: Lifecycle(BlockLeased); Storage, which names the phase."""
        if self._core.lifecycle.is_leased(record.id):
            raise CacheResidencyError.Lifecycle(CacheLifecycleError.BlockLeased(record.id))
        phase = record.storage.phase
        if phase is not CacheStoragePhase.DEVICE:
            raise CacheResidencyError.Storage(
                CacheStorageError.InvalidPhase(CacheStoragePhase.DEVICE, phase)
            )
        if record.storage.backing is not None:
            raise CacheResidencyError.Storage(CacheStorageError.BackingAlreadyExists())

    def take_ready(self, record: BlockRecord, host: HostCopy) -> None:
        """A shared block needs no copy and no charge: begin and finish in one step. With the lock
        held; the caller publishes.
        """
        operation = _Ready(record.id, self._core.next_operation(), host)
        record.storage.begin_host_demotion(operation)
        record.storage.finish_host_demotion(operation.operation_id, host)
        self._core.count(record.id.global_layer, host_demotions=1)
        self._core.changed(record)


class _Ready:
    """A copy that was done before it was asked for."""

    def __init__(self, block_id: CacheBlockId, operation_id: int, host: HostCopy) -> None:
        self.block_id = block_id
        self.operation_id = operation_id
        self._host = host

    def wait(self) -> HostCopy:
        """The copy."""
        return self._host


def _waits_for(record: BlockRecord, operation: HostCopyOperation) -> bool:
    pending = record.storage.host_demotion
    return pending is not None and pending.operation_id == operation.operation_id


def _exceeds(host: HostCopy, pending: Pending) -> bool:
    """Whether a copy has taken more than what was reserved for it."""
    return pending.target is None and host.capacity_bytes > pending.bound
