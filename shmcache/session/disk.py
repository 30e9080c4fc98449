"""Host to disk and back, in the background, by one thread with a bounded queue.

Why: disks are slow and a session must not wait for them with its lock held. Each write commits on
the worker's thread, before anybody who waits for it wakes up; its buffers stay charged until they
are gone, whatever has become of the block meanwhile.

Contract: contract/residency.md B4 and B6. A write that fails leaves no file and the block on the
host; what it said is raised once, by whoever looks next.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from shmcache.errors import (
    CacheIoWorkerError,
    CacheResidencyError,
    LiveCachePublicationError,
)
from shmcache.io import CacheIoSubmission, CacheIoWorker
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.pool.live_files import LiveDirectory
from shmcache.prompt.live import remove_live_block
from shmcache.session.backend import BlockSpec, HostCopy
from shmcache.session.block_files import read_block, write_block
from shmcache.session.core import SessionCore, raise_first
from shmcache.session.options import LiveCacheDiskPolicyEnabled
from shmcache.session.records import (
    IDLE,
    BlockFile,
    BlockRecord,
    PendingIo,
    Ticket,
    WriteReservation,
)
from shmcache.states.storage import CacheIoOperationKey, CacheIoOperationKind, CacheStoragePhase

_P = CacheStoragePhase


class Leaving(Enum):
    """What became of an attempt to move a block from host to disk, if no write is to be awaited."""

    FREED = "freed"
    RETRY = "retry"


class _Task:
    """What the worker runs. `settle` is told once that the task has ended or will never run."""

    def __init__(self, tier: DiskTier, key: CacheIoOperationKey, spec: BlockSpec) -> None:
        self.tier: DiskTier | None = tier
        self.key = key
        self.spec = spec
        self.host: HostCopy | None = None

    def run(self) -> HostCopy | BlockFile:
        """Do it, on the worker's thread."""
        raise NotImplementedError


class _Write(_Task):
    """Host arrays into a new file."""

    def __init__(
        self,
        tier: DiskTier,
        key: CacheIoOperationKey,
        spec: BlockSpec,
        host: HostCopy,
        directory: Path,
    ) -> None:
        super().__init__(tier, key, spec)
        self.host = host
        self.directory = directory

    def run(self) -> BlockFile:
        """Write, commit, drop the buffers, and only then let the worker tell anybody."""
        tier, host = self.tier, self.host
        assert tier is not None
        assert host is not None
        file, failure = None, ""
        try:
            file = write_block(self.directory, self.key.id, self.spec, host.arrays)
        except Exception as error:  # noqa: BLE001 (the block and the waiters are told)
            failure = str(error) or type(error).__name__
            traceback.clear_frames(error.__traceback__)  # they hold the buffers
        self.tier = self.host = host = None  # with the error above, all that led to the buffers
        if file is None:
            tier.write_failed(self.key, failure)
        else:
            tier.commit_write(self.key, file)
        tier.settle_write(self.key)
        if file is None:
            raise RuntimeError(failure)
        return file

    def __del__(self) -> None:
        # Dropped unrun: cancelled in the queue, or never admitted. Nothing here may wait.
        if self.tier is not None:
            self.tier.abandon_write(self.key)


class _Read(_Task):
    """A file into host arrays that were allocated when the read was admitted."""

    def __init__(
        self,
        tier: DiskTier,
        key: CacheIoOperationKey,
        spec: BlockSpec,
        host: HostCopy,
        file: BlockFile,
    ) -> None:
        super().__init__(tier, key, spec)
        self.host = host
        self.file = file

    def run(self) -> HostCopy:
        """Read and compare."""
        host, self.host = self.host, None
        assert host is not None
        read_block(self.file, self.spec, host.arrays)
        return host


class DiskTier:
    """See the module. The worker's thread starts with the first read or write."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core
        self._live: LiveDirectory | None = None
        self._worker: CacheIoWorker[_Task, HostCopy | BlockFile] | None = None

    @property
    def worker(self) -> CacheIoWorker[_Task, HostCopy | BlockFile]:
        """With the lock held."""
        if self._worker is None:
            self._worker = CacheIoWorker(
                self._core.queue_capacity, f"shmcache-disk-{self._core.id}", _execute, _discard
            )
        return self._worker

    def open_directory(self) -> None:
        """Note in the pool where files may come to be, before there is one; then make the folder.

        Errors: Io `create_live_directory`; SegmentError.LiveDirectoriesFull.
        """
        policy = self._core.options.live_disk_policy
        if not isinstance(policy, LiveCacheDiskPolicyEnabled):
            return
        try:
            policy.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._live = self._core.pool.live_directory(policy.directory)
        except OSError as error:
            raise CacheResidencyError.Io(
                "create_live_directory", policy.directory, error
            ) from error

    def close_directory(self, *, wait: bool) -> None:
        """No file of this session is left; without waiting from a finalizer."""
        if self._live is not None:
            self._live.close(wait=wait)

    def stop(self) -> None:
        """Finish what was admitted and end the thread; without the lock."""
        if self._worker is not None:
            self._worker.close()

    def stop_soon(self) -> None:
        """The same from a finalizer: the thread ends by itself."""
        self._worker = None

    # Host to disk ---------------------------------------------------------------------------------

    def leave_host(self, id: CacheBlockId) -> Leaving | Ticket:
        """Move a block from host to disk, without the lock; a ticket if a write was begun.

        Errors: LiveDiskRequired, BudgetExceeded(DISK), Pool, IoExecution.
        """
        core = self._core
        with core.lock:
            record = core.records.get(id)
            if record is None or not self._may_leave(record):
                return Leaving.RETRY
            if record.storage.backing is not None:
                self._release_host(record)
                return Leaving.FREED
            directory = self._admit_write(record)
            begun = self._begin_write(record, directory)
        if not isinstance(begun, CacheIoSubmission):
            self.retire([begun])
            return Leaving.RETRY
        self._enqueue(begun, record)
        return begun.ticket

    def wait_write(self, ticket: Ticket) -> None:
        """Wait until the write is committed and its buffers are gone, without the lock.

        Errors: Runtime when it failed, and then nobody else is told; DiskOperationCancelled.
        """
        started_ns = time.monotonic_ns()
        core, key = self._core, ticket.key
        try:
            self._wait(ticket)
        except CacheIoWorkerError.OperationFailed as error:
            with core.lock:
                if core.background_error is not None and core.background_error[0] == key:
                    core.background_error = None
            raise CacheResidencyError.Runtime(
                f"a block could not be written to disk: {error.message}"
            ) from error
        finally:
            with core.lock:
                waited_ns = time.monotonic_ns() - started_ns
                core.count(key.id.global_layer, in_flight_waits=1, transfer_wait=waited_ns)

    def pending_write(self) -> Ticket | None:
        """The oldest write that has not ended; with the lock held."""
        for reservation in self._core.ledger.writes.values():
            return reservation.ticket
        return None

    def _may_leave(self, record: BlockRecord) -> bool:
        idle = record.storage.phase in (_P.HOST_UNBACKED, _P.HOST_BACKED)
        return idle and not self._core.lifecycle.is_leased(record.id)

    def _release_host(self, record: BlockRecord) -> None:
        record.storage.release_host_to_disk()
        self._core.count(record.id.global_layer, disk_demotions=1)
        self._core.changed(record)
        self._core.publish()

    def _admit_write(self, record: BlockRecord) -> Path:
        """The directory to write to. Errors: LiveDiskRequired, BudgetExceeded(DISK)."""
        core, layer = self._core, record.id.global_layer
        policy = core.options.live_disk_policy
        sums = core.sums()
        if not isinstance(policy, LiveCacheDiskPolicyEnabled):
            core.count(layer, failures=1)
            budget = core.options.host_budget_bytes
            raise CacheResidencyError.LiveDiskRequired(sums.host, budget)
        required = sums.disk + record.logical_bytes
        if required > policy.budget_bytes:
            core.count(layer, failures=1)
            raise CacheResidencyError.BudgetExceeded(CacheTier.DISK, required, policy.budget_bytes)
        assert self._live is not None
        return self._live.path

    def _begin_write(
        self, record: BlockRecord, directory: Path
    ) -> CacheIoSubmission[_Task, HostCopy | BlockFile] | Ticket:
        """The submission to enqueue, or the ticket of a finished operation that has the key yet."""
        core = self._core
        host = record.storage.host_resource
        assert host is not None
        key = CacheIoOperationKey(core.generation, record.id, CacheIoOperationKind.WRITE)
        with core.reserve(transfer=host.transfer_bytes, disk=record.logical_bytes) as admitted:
            task = _Write(self, key, record.spec, host, directory)
            submission = self.worker.prepare(key, task)
            if submission.joined:
                task.tier = None
                return submission.ticket
            core.ledger.writes[key] = WriteReservation(
                key, record.logical_bytes, host.allocation, host.transfer_bytes, submission.ticket
            )
            record.storage.begin_write(PendingIo(key, submission.ticket))
            core.changed(record)
            core.publish(admitted)
        return submission

    def _enqueue(
        self, submission: CacheIoSubmission[_Task, HostCopy | BlockFile], record: BlockRecord
    ) -> None:
        core, layer = self._core, record.id.global_layer
        started_ns = time.monotonic_ns()
        try:
            outcome = submission.enqueue()
        except CacheIoWorkerError as error:
            with core.lock:
                if record.storage.fail_io_if_matches(submission.ticket.key):
                    self._changed(record)
                core.count(layer, failures=1)
                core.publish()
            self.retire([submission.ticket])
            raise CacheResidencyError.IoExecution(error) from error
        with core.lock:
            report = core.telemetry.report
            peak = max(report.queue_peak_occupancy, outcome.peak_occupancy)
            report.queue_peak_occupancy = peak
            if outcome.backpressure:
                report.queue_backpressure += 1
                if submission.ticket.key.kind is CacheIoOperationKind.WRITE:
                    core.count(layer, transfer_wait=time.monotonic_ns() - started_ns)

    # On the worker's thread -----------------------------------------------------------------------

    def commit_write(self, key: CacheIoOperationKey, file: BlockFile) -> None:
        """The file exists: the block takes it, or it goes."""
        core = self._core
        with core.lock:
            record = core.records.get(key.id)
            wanted = (
                not core.closed
                and core.generation == key.generation
                and record is not None
                and record.storage.io_matches(key)
            )
            if wanted and record is not None:
                record.storage.finish_write(key, file)
                core.count(
                    key.id.global_layer, disk_demotions=1, transfer_bytes=record.logical_bytes
                )
                core.changed(record)
                core.publish()
        if not wanted:
            _discard(file)

    def write_failed(self, key: CacheIoOperationKey, message: str) -> None:
        """There is no file: the block stays on the host."""
        core = self._core
        with core.lock:
            if core.generation != key.generation or core.closed:
                return
            record = core.records.get(key.id)
            if record is not None and record.storage.fail_io_if_matches(key):
                self._changed(record)
            core.count(key.id.global_layer, failures=1)
            core.background_error = key, message
            core.publish()

    def settle_write(self, key: CacheIoOperationKey) -> None:
        """The task's buffers are gone."""
        with self._core.lock:
            self._settle(key)

    def abandon_write(self, key: CacheIoOperationKey) -> None:
        """The same, for a task that was dropped unrun; from a finalizer."""
        self._core.lock.later(lambda: self._settle(key))

    def _settle(self, key: CacheIoOperationKey) -> None:
        core = self._core
        record = core.records.get(key.id)
        if record is not None and record.storage.fail_io_if_matches(key):
            self._changed(record)
        if core.ledger.writes.pop(key, None) is not None and not core.closed:
            core.publish()

    # Disk to host ---------------------------------------------------------------------------------

    def begin_read(
        self, record: BlockRecord, host: HostCopy
    ) -> CacheIoSubmission[_Task, HostCopy | BlockFile] | Ticket:
        """With the lock held: the submission to enqueue, or as for a write. Does not publish."""
        file = record.storage.backing
        assert file is not None
        key = CacheIoOperationKey(self._core.generation, record.id, CacheIoOperationKind.READ)
        submission = self.worker.prepare(key, _Read(self, key, record.spec, host, file))
        if submission.joined:
            return submission.ticket
        record.storage.begin_read(PendingIo(key, submission.ticket))
        self._core.changed(record)
        return submission

    def undo_read(self, record: BlockRecord) -> None:
        """A read that was begun will not be enqueued; with the lock held."""
        io = record.storage.io
        if io is not None and io.key.kind is CacheIoOperationKind.READ:
            record.storage.fail_io(io.key)
            self._changed(record)

    def enqueue_read(
        self, submission: CacheIoSubmission[_Task, HostCopy | BlockFile], record: BlockRecord
    ) -> None:
        """Without the lock. Errors: IoExecution; the block is then on disk as before."""
        self._enqueue(submission, record)

    def apply_read(self, ticket: Ticket, record: BlockRecord) -> None:
        """Wait for the read, without the lock, and take it over if the block still wants it.

        Errors: DiskOperationCancelled; Runtime when the file is gone or not what was written.
        """
        core, key = self._core, ticket.key
        host: HostCopy | BlockFile | None = None
        failure: str | None = None  # not the error, which would keep this frame alive
        try:
            host = ticket.wait()
        except CacheIoWorkerError.OperationFailed as error:
            failure = error.message
        except CacheIoWorkerError.Cancelled as error:
            with core.lock:  # a submission that was interrupted, not a change of generation
                if record.storage.fail_io_if_matches(key):
                    self._changed(record)
            raise CacheResidencyError.DiskOperationCancelled(key.generation) from error
        except CacheIoWorkerError as error:
            raise CacheResidencyError.IoExecution(error) from error
        with core.lock:
            core.check_generation(key.generation)
            if record.storage.io_matches(key):
                if isinstance(host, HostCopy):
                    record.storage.finish_read(key, host)
                else:
                    record.storage.fail_io(key)
                    core.count(key.id.global_layer, failures=1)
                self._changed(record)
                core.publish()
        del host
        self.retire([ticket])
        if failure is not None:
            raise CacheResidencyError.Runtime(f"a block could not be read from disk: {failure}")

    # Both -----------------------------------------------------------------------------------------

    def retire(self, tickets: Iterable[Ticket]) -> None:
        """Wait until their tasks are gone and free their keys, without the lock.

        Errors: IoExecution (Poisoned), after all were worked off.
        """
        errors: list[Exception] = []
        for ticket in tickets:
            try:
                self._retire(ticket)
            except CacheIoWorkerError as error:
                errors.append(CacheResidencyError.IoExecution(error))
        raise_first(errors)

    def _retire(self, ticket: Ticket) -> None:
        ticket.wait_for_task_resources()
        if self._worker is not None:
            self._worker.retire(ticket)

    def _wait(self, ticket: Ticket) -> None:
        """Errors: OperationFailed; DiskOperationCancelled, at once; IoExecution."""
        try:
            try:
                ticket.wait()
            except CacheIoWorkerError.OperationFailed:
                self._retire(ticket)
                raise
            self._retire(ticket)
        except CacheIoWorkerError.Cancelled as error:
            raise CacheResidencyError.DiskOperationCancelled(error.generation) from error
        except CacheIoWorkerError.Poisoned as error:
            raise CacheResidencyError.IoExecution(error) from error

    def _changed(self, record: BlockRecord) -> None:
        record.pending = IDLE
        self._core.changed(record)


def _execute(task: _Task) -> HostCopy | BlockFile:
    return task.run()


def remove_files(files: Iterable[BlockFile]) -> None:
    """Delete the files of removed blocks, those of prompt caches excepted.

    Errors: Io, the first, after all were tried.
    """
    errors: list[Exception] = []
    for file in files:
        if not file.persistent:
            try:
                remove_live_block(file.path)
            except LiveCachePublicationError.Io as error:
                errors.append(CacheResidencyError.Io(error.action, error.path, error.source))
    raise_first(errors)


def bytes_left(files: Iterable[BlockFile]) -> int:
    """What files that should have been deleted still occupy."""
    return sum(
        file.payload_bytes for file in files if not file.persistent and os.path.lexists(file.path)
    )


def _discard(output: HostCopy | BlockFile) -> None:
    """An output that nobody will see."""
    if isinstance(output, BlockFile):
        with contextlib.suppress(CacheResidencyError.Io):
            remove_files([output])
