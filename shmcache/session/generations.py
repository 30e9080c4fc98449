"""A new generation: what was begun before must not complete what is begun after.

Why: a shortened cache has blocks of the same identity again, soon, with other tokens. So whenever
blocks leave, everything that is under way is cancelled or cut loose, and the operation that removed
them returns only when no old buffer is alive. Until then the pool shows the buffers.

Contract: contract/residency.md B8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec

from shmcache.errors import CacheIoWorkerError, CacheResidencyError
from shmcache.session.backend import HostCopyOperation
from shmcache.session.core import SessionCore, raise_first
from shmcache.session.demotions import Demotions
from shmcache.session.disk import DiskTier
from shmcache.session.records import IDLE, RetiringDemotion, RetiringRead, Ticket
from shmcache.states.storage import CacheIoOperationKind

_GENERATIONS = 1 << 64

Arguments = ParamSpec("Arguments")


class Retiring(NamedTuple):
    """What an ended generation has left running."""

    demotions: list[HostCopyOperation]
    reads: list[tuple[int, Ticket]]
    writes: list[Ticket]


class Generations:
    """See the module."""

    def __init__(self, core: SessionCore, demotions: Demotions, disk: DiskTier) -> None:
        self._core = core
        self._demotions = demotions
        self._disk = disk

    def advance(self) -> Retiring:
        """Begin a new generation, with the lock held and before any record is removed."""
        core = self._core
        core.generation = (core.generation + 1) % _GENERATIONS
        core.background_error = None
        retiring = Retiring([], [], [])
        for record in list(core.busy.values()):
            storage = record.storage
            operation, io = storage.host_demotion, storage.io
            if operation is not None:
                core.ledger.retiring_demotions[operation.operation_id] = RetiringDemotion(
                    operation, record.logical_bytes, record.pending
                )
                retiring.demotions.append(operation)
            elif io is not None and io.key.kind is CacheIoOperationKind.READ:
                self._cancel(io.ticket)
                read = RetiringRead(io.ticket, record.id.global_layer, record.pending)
                retiring.reads.append((core.ledger.retire_read(read), io.ticket))
                storage.fail_io_if_matches(io.key)
                record.pending = IDLE
                core.changed(record)
            elif io is not None:
                self._cancel(io.ticket)
                retiring.writes.append(io.ticket)
        # A write whose block has gone, or does not wait for it any more, holds its buffers, too.
        known = {ticket.key for ticket in retiring.writes}
        retiring.writes.extend(
            write.ticket for key, write in core.ledger.writes.items() if key not in known
        )
        return retiring

    def retire(self, retiring: Retiring) -> None:
        """Wait until all of it is gone, without the lock.

        Errors: the first one, after everything was worked off.
        """
        errors: list[Exception] = []
        for operation in retiring.demotions:
            self._attempt(errors, self._finish, operation)
        for number, ticket in retiring.reads:
            self._attempt(errors, self._drop_read, number, ticket)
        self._attempt(errors, self._disk.retire, retiring.writes)
        raise_first(errors)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.cancel():
            self._core.telemetry.report.cancellations += 1

    def _finish(self, operation: HostCopyOperation) -> None:
        core = self._core
        try:
            self._demotions.finish(operation)
        finally:
            with core.lock:
                core.ledger.retiring_demotions.pop(operation.operation_id, None)
                core.publish()

    def _drop_read(self, number: int, ticket: Ticket) -> None:
        core = self._core
        try:
            self._disk.retire([ticket])
        finally:
            with core.lock:
                core.ledger.retiring_reads.pop(number, None)
                core.publish()

    @staticmethod
    def _attempt(
        errors: list[Exception],
        step: Callable[Arguments, None],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> None:
        try:
            step(*arguments, **named)
        except (CacheResidencyError, CacheIoWorkerError) as error:
            errors.append(error)
