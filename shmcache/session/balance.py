"""Back under budget: who leaves the device, who leaves the host, and when there is nobody left.

Why: growth and promotions are published first and corrected at once; this is the correction. It
runs after every change that can add bytes, and costs one call of the pool when nothing is over.

Contract: contract/residency.md B5. Called without the lock; each round looks again at everything. A
failure counts once and leaves what was done so far: its caller rolls back what it had added.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

from shmcache.errors import CachePoolError, CacheResidencyError
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.pool.values import CachePoolResource, CachePoolUsage
from shmcache.session.backend import HostCopyOperation
from shmcache.session.core import SessionCore
from shmcache.session.demotions import Demotions
from shmcache.session.disk import DiskTier, Leaving
from shmcache.session.ledger import Sums
from shmcache.session.records import Ticket


class _Finish(NamedTuple):
    """A copy to the host to wait for."""

    operation: HostCopyOperation


class _LeaveHost(NamedTuple):
    """A block to move from host to disk, and whether to wait until it has gone."""

    id: CacheBlockId
    awaited: bool = True


class _Share(NamedTuple):
    """A block to publish before it leaves the device."""

    id: CacheBlockId


class _AwaitWrite(NamedTuple):
    """A write that will free host memory."""

    ticket: Ticket


Step = _Finish | _LeaveHost | _AwaitWrite | _Share


class Balance:
    """See the module."""

    def __init__(self, core: SessionCore, demotions: Demotions, disk: DiskTier) -> None:
        self._core = core
        self._demotions = demotions
        self._disk = disk
        self._settled: Sums | None = None  # what was held when a look last found nothing to do

    def restore(self, required: CacheBlockId | None, *, allow_recent: bool = False) -> None:
        """Move blocks until no axis is over a budget. `required` stays where it is.

        Errors: the background error, once; BudgetExceeded, LiveDiskRequired, Pool, Runtime.
        """
        with self._core.lock:
            step = self.look(required, allow_recent)
        self.go_on(step, required, allow_recent)

    def go_on(
        self, step: Step | None, required: CacheBlockId | None, allow_recent: bool = False
    ) -> None:
        """Carry out what `look` has found, and look again until there is nothing left."""
        while step is not None:
            if isinstance(step, _LeaveHost) and not step.awaited:
                self._write_ahead(step.id)
                return
            self._carry_out(step)
            with self._core.lock:
                step = self.look(required, allow_recent)

    def free_host(
        self,
        bound: int,
        required: CacheBlockId | None,
        refusal: CachePoolError | None = None,
    ) -> None:
        """One step towards host room for `bound` bytes, without the lock.

        `refusal`: what the pool said to these bytes; raised at once if they are not its trouble.

        Errors: BudgetExceeded(HOST), LiveDiskRequired, Pool when nothing on the host can go.
        """
        with self._core.lock:
            if refusal is not None and not is_refusal(refusal, CachePoolResource.HOST):
                self._core.count(_layer(required), failures=1)
                raise CacheResidencyError.Pool(refusal)
            step = self._host_step(bound, required, refusal)
        self._carry_out(step)

    def host_fits(self, bound: int) -> bool:
        """Whether the session's own budget has room for `bound` bytes; with the lock held."""
        return self._core.sums().host + bound <= self._core.options.host_budget_bytes

    # One round, with the lock held ----------------------------------------------------------------

    def glance(self, required: CacheBlockId | None, allow_recent: bool = False) -> Step | None:
        """`look` for who has added no bytes: nothing while the session holds what it held then.

        Why: attention takes and releases a lease per block. Should the pool be over its limit
        meanwhile, that is for whoever grew to correct.
        """
        core = self._core
        if self._settled == core.sums() and core.background_error is None and not core.closed:
            return None
        return self.look(required, allow_recent)

    def look(self, required: CacheBlockId | None, allow_recent: bool = False) -> Step | None:
        """Publish, and say what must be done now; None when nothing is over.

        The caller of a change looks under the lock that it made the change under.
        """
        core = self._core
        if core.closed:
            core.check_open()
        if core.background_error is not None:
            core.raise_background_error()
        self._settled = None
        used, sums = core.publish(), core.published
        limits = core.limits
        while sums.device > core.options.device_budget_bytes or (
            used.device_bytes > limits.device_bytes
        ):
            step = self._device_step(sums, used, required, allow_recent)
            if step is not None:
                return step
            used, sums = core.publish(), core.published
        if sums.host > core.options.host_budget_bytes or (
            used.host_bytes > limits.host_bytes and not core.memory.pool_evicts
        ):
            return self._host_over_step(sums, used, required)
        if self._wants_write(sums, used):
            victim = core.victims.candidate(CacheTier.HOST, required, 0)
            if victim is not None and self._disk_has_room(victim, sums):
                return _LeaveHost(victim, awaited=False)
        self._settled = sums
        return None

    def _device_step(
        self,
        sums: Sums,
        used: CachePoolUsage,
        required: CacheBlockId | None,
        allow_recent: bool,
    ) -> Step | None:
        """What to wait for; None when a step was done that needs no waiting."""
        core = self._core
        operation = core.pending_demotion()
        if operation is not None:
            return _Finish(operation)
        recent = core.options.recent_device_blocks
        victim = core.victims.candidate(CacheTier.DEVICE, required, recent)
        if victim is None and allow_recent:
            victim = core.victims.candidate(CacheTier.DEVICE, required, 0)
        if victim is None:
            raise self._device_refusal(sums, used, required)
        record = core.records[victim]
        if record.storage.backing is not None:
            core.release_device_to_disk(record)
            return None
        if core.shared is not None and core.shared.wants(victim):
            return _Share(victim)
        ready = core.ready(record)
        if ready is not None:
            self._demotions.take_ready(record, ready)
            return None
        bound = core.memory.bound(victim, record.spec)
        if not self.host_fits(bound):
            return self._host_step(bound, required)
        try:
            begun = self._demotions.begin(victim)
        except CacheResidencyError.Pool as error:
            if not is_refusal(error.error, CachePoolResource.HOST):
                core.count(victim.global_layer, failures=1)
                raise
            return self._host_step(bound, required, copy.copy(error.error))
        return None if begun is None else _Finish(begun)

    def _device_refusal(
        self, sums: Sums, used: CachePoolUsage, required: CacheBlockId | None
    ) -> CacheResidencyError:
        core = self._core
        core.count(_layer(required), failures=1)
        budget = core.options.device_budget_bytes
        if sums.device > budget:
            return CacheResidencyError.BudgetExceeded(CacheTier.DEVICE, sums.device, budget)
        return _pool_refusal(CachePoolResource.DEVICE, used.device_bytes, core.limits.device_bytes)

    def _host_step(
        self,
        bound: int,
        required: CacheBlockId | None,
        refusal: CachePoolError | None = None,
    ) -> _LeaveHost | _AwaitWrite:
        """How to get host room for `bound` bytes more. `refusal`: the pool has said no."""
        core, layer = self._core, _layer(required)
        budget = core.options.host_budget_bytes
        if bound > budget:
            core.count(layer, failures=1)
            raise CacheResidencyError.BudgetExceeded(CacheTier.HOST, bound, budget)
        victim = core.victims.candidate(CacheTier.HOST, required, 0)
        if victim is not None:
            return _LeaveHost(victim)
        write = self._disk.pending_write()
        if write is not None:
            return _AwaitWrite(write)
        core.count(layer, failures=1)
        if refusal is not None:
            raise CacheResidencyError.Pool(refusal)
        held = core.sums().host
        if core.options.disk_budget_bytes is None:
            raise CacheResidencyError.LiveDiskRequired(held, budget)
        raise CacheResidencyError.BudgetExceeded(CacheTier.HOST, held + bound, budget)

    def _host_over_step(
        self, sums: Sums, used: CachePoolUsage, required: CacheBlockId | None
    ) -> _LeaveHost | _AwaitWrite:
        core = self._core
        budget, limit = core.options.host_budget_bytes, core.limits.host_bytes
        victim = core.victims.candidate(CacheTier.HOST, required, 0)
        if victim is not None:
            return _LeaveHost(victim)
        write = self._disk.pending_write()
        if write is not None:
            return _AwaitWrite(write)
        core.count(_layer(required), failures=1)
        if sums.host <= budget:
            raise _pool_refusal(CachePoolResource.HOST, used.host_bytes, limit)
        raise CacheResidencyError.BudgetExceeded(CacheTier.HOST, sums.host, budget)

    def _wants_write(self, sums: Sums, used: CachePoolUsage) -> bool:
        core = self._core
        if core.options.disk_budget_bytes is None or sums.host == 0:
            return False
        if sums.host >= core.options.host_budget_bytes:
            return True
        return used.host_bytes >= core.limits.host_bytes and not core.memory.pool_evicts

    def _disk_has_room(self, id: CacheBlockId, sums: Sums) -> bool:
        """A write ahead of need is not worth a failure."""
        budget = self._core.options.disk_budget_bytes
        assert budget is not None
        record = self._core.records[id]
        return record.storage.backing is not None or sums.disk + record.logical_bytes <= budget

    # Between rounds, without the lock -------------------------------------------------------------

    def _carry_out(self, step: Step) -> None:
        if isinstance(step, _Finish):
            self._demotions.finish(step.operation)
        elif isinstance(step, _AwaitWrite):
            self._disk.wait_write(step.ticket)
        elif isinstance(step, _Share):
            assert self._core.shared is not None
            self._core.shared.demanded(step.id)
        else:
            gone = self._leave_host(step.id)
            if not isinstance(gone, Leaving):
                self._disk.wait_write(gone)

    def _leave_host(self, id: CacheBlockId) -> Leaving | Ticket:
        try:
            return self._disk.leave_host(id)
        except CacheResidencyError.Pool:
            with self._core.lock:
                self._core.count(id.global_layer, failures=1)
            raise

    def _write_ahead(self, id: CacheBlockId) -> None:
        try:
            self._disk.leave_host(id)
        except (CacheResidencyError.Pool, CacheResidencyError.BudgetExceeded):
            return  # another session was faster; nothing is over


def _layer(id: CacheBlockId | None) -> int | None:
    return None if id is None else id.global_layer


def _pool_refusal(
    resource: CachePoolResource, required: int, budget: int
) -> CacheResidencyError.Pool:
    return CacheResidencyError.Pool(CachePoolError.BudgetExceeded(resource, required, budget))


def is_refusal(error: CachePoolError, resource: CachePoolResource) -> bool:
    """Whether the pool has said that this axis is full."""
    return isinstance(error, CachePoolError.BudgetExceeded) and error.resource is resource
