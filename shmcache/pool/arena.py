"""The arena of a pool: store once, lease anywhere, without copying.

Why         Workers of one host compute the same prefixes; each should be in memory once, readable
            by all, and gone when room is needed and nobody reads it.
Contract    allocate -> write -> publish makes a block visible under a 256-bit key; lookup and match
            lease what is there. What nobody leases is evicted when room is needed, by the policy
            chosen at create. A miss is always a correct answer.
Invariants  G1: a block is charged on the host axis, with the size of its class. G3, G4, G7.
Concurrency Any thread. Hits and misses take no lock.
Death       Unpublished blocks, leases and claims of a killed process are given back by reclaim;
            published blocks stay.
Errors      SegmentError.ArenaFull, BlockTooLarge, NoArena, TableFull;
            CachePoolError.BudgetExceeded; BufferError while views live.
Cost        docs/performance.md.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from shmcache import _core, bounds
from shmcache.errors import CachePoolError, SegmentError
from shmcache.pool.admission import Admission, admitted
from shmcache.pool.values import CachePoolResource
from shmcache.pool.waiting import deadline_ns, patiently

if TYPE_CHECKING:
    from shmcache._core import Key, Keys

Refusal = CachePoolError | SegmentError
_CHUNK_ALIGN = 2 << 20  # a huge page: madvise takes whole pages


class PublishResult(NamedTuple):
    """What publishing a block answers.

    `lease` is on the block that is now found under the key; `created` is False when it was there
    before, and when it cannot be found at all because its place in the index is full.
    """

    lease: _core.Lease
    created: bool


_core.bind_publish_result(PublishResult)


class BlockStat(msgspec.Struct, frozen=True, gc=False):
    """What is known of one published block; of `leased` and `uses`, what was known a moment ago."""

    nbytes: int
    capacity: int
    generation: int
    uses: int
    protected: bool
    leased: bool


class ArenaClass(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one size. Units: `*_bytes` bytes, the others blocks; `slabs` slabs."""

    block_bytes: int
    slabs: int
    used: int
    published: int
    doomed: int
    protected: int
    leased: int

    @property
    def private(self) -> int:
        """Blocks that some owner writes or keeps to itself."""
        return self.used - self.published - self.doomed

    @property
    def evictable(self) -> int:
        """Published blocks that nobody leases and that are not protected; at least so many."""
        return max(self.published - self.leased - self.protected, 0)


class ArenaReport(msgspec.Struct, frozen=True, gc=False):
    """One look at the arena: sums at one instant, leases as they were meanwhile.

    `stored` to `slabs_moved` and `hits` to `bad_checksums` count since the pool was made.
    """

    arena_bytes: int
    used_bytes: int
    used_blocks: int
    slab_bytes: int
    slabs: int
    slabs_used: int
    draining: bool
    classes: tuple[ArenaClass, ...]
    stored: int
    evicted: int
    invalidated: int
    duplicates: int
    unindexed: int
    slabs_moved: int
    hits: int
    misses: int
    hits_unseen: int
    bad_checksums: int

    def _bytes(self, what: str) -> int:
        return sum(kind.block_bytes * getattr(kind, what) for kind in self.classes)

    @property
    def published_bytes(self) -> int:
        """Findable by their keys."""
        return self._bytes("published")

    @property
    def private_bytes(self) -> int:
        """Written or kept by one owner."""
        return self._bytes("private")

    @property
    def leased_bytes(self) -> int:
        """Of published blocks that anybody leases, each once."""
        return self._bytes("leased")

    @property
    def evictable_bytes(self) -> int:
        """Published, and neither leased nor protected."""
        return self._bytes("evictable")

    @property
    def doomed_bytes(self) -> int:
        """Withdrawn, and still leased."""
        return self._bytes("doomed")

    @property
    def fragmentation(self) -> float:
        """Part of the slabs in use that is in no block: free places, and what no place fits."""
        held = min(self.slabs_used * self.slab_bytes, self.arena_bytes)
        return 1 - self.used_bytes / held if held else 0.0


class ArenaHolding(msgspec.Struct, frozen=True, gc=False):
    """What one owner keeps from being evicted."""

    slot: int
    pid: int
    leased_blocks: int
    leased_bytes: int
    private_blocks: int
    private_bytes: int


class _Claimed(Exception):
    """Another makes the block: the refusal of a claim."""


class ArenaPool(_core.Arena):
    """The part of `CacheResidencyPool` that is about blocks. See the module."""

    _deadline_ns = staticmethod(deadline_ns)

    def _allocate_patiently(
        self,
        nbytes: int,
        manager: int | None,
        reservation: _core.CachePoolReservation | None,
        until_ns: int,
        refusal: Refusal,
    ) -> _core.Block:
        def attempt() -> _core.Block | None:
            nonlocal refusal
            answer = self._allocate_once(nbytes, manager, reservation)
            if isinstance(answer, _core.Block):
                return answer
            refusal = answer
            return None

        block = patiently(self, attempt, until_ns, hopeless=nbytes > self.limits.host_bytes)
        if block is not None:
            return block
        try:
            raise self._named(refusal)
        finally:
            del refusal  # an error must not keep the frame that keeps it

    def allocate_async(
        self,
        nbytes: int,
        *,
        manager: int | None = None,
        reservation: _core.CachePoolReservation | None = None,
        timeout: float | None = None,
    ) -> Admission[_core.Block]:
        """`allocate` for an event loop: `await` the block, or `async with` it.

        Waits up to `timeout` seconds, None: until it is cancelled. All else as `reserve_async`;
        at the end of `async with` a block that was published stays published.
        """
        return Admission(self._allocate_in_loop(nbytes, manager, reservation, timeout))

    async def _allocate_in_loop(
        self,
        nbytes: int,
        manager: int | None,
        reservation: _core.CachePoolReservation | None,
        timeout: float | None,
    ) -> _core.Block:
        until_ns = deadline_ns(timeout)
        if until_ns == 0 or nbytes > self.limits.host_bytes:
            return self.allocate(nbytes, manager=manager, reservation=reservation)
        block: _core.Block = await admitted(
            self,
            ("allocate", nbytes, manager, id(reservation)),
            partial(self._allocate_at_once, nbytes, manager, reservation),
            until_ns,
            named=self._named_again,
        )
        return block

    def _named_again(self, refusal: Refusal) -> Refusal:
        return copy.copy(self._named(refusal))

    def _named(self, refusal: Refusal) -> Refusal:
        """The refusal, with the names of those who hold the arena."""
        if not isinstance(refusal, SegmentError.ArenaFull):
            return refusal
        holders = [(row.pid, row.leased_bytes + row.private_bytes) for row in self.holdings()]
        holders.sort(key=lambda holder: -holder[1])
        return SegmentError.ArenaFull(refusal.needed, tuple(holders))

    def claim(self, key: Key, *, timeout: float | None = 0) -> _core.Lease | _core.Claim | None:
        """Ask who makes the block of this key: a Lease when it is there, a Claim when you do.

        While another live owner has the claim: waits up to `timeout` seconds, then None. The claim
        passes on at once when its holder dies. It is a courtesy: publishing needs none.
        """
        until_ns = deadline_ns(timeout)
        answer = self._claim_or_lease(key)
        if answer is None:
            waited = patiently(self, partial(self._claim_or_lease, key), until_ns)
            answer = cast("_core.Lease | _core.Claim | None", waited)  # mypy joins the two
        return answer

    def _claim_or_lease(self, key: Key) -> _core.Lease | _core.Claim | None:
        if (lease := self.lookup(key)) is not None:
            return lease
        claim = self._claim_once(key)
        if claim is not None and (lease := self.lookup(key)) is not None:
            claim.release()  # its maker was faster than our claim
            return lease
        return claim

    def claim_async(
        self, key: Key, *, timeout: float | None = None
    ) -> Admission[_core.Lease | _core.Claim | None]:
        """`claim` for an event loop: `await` what it answers, or `async with` it.

        Waits up to `timeout` seconds, None: until it is cancelled. All else as `reserve_async`.
        """
        return Admission(self._claim_in_loop(bytes(memoryview(cast("bytes", key))), timeout))

    async def _claim_in_loop(
        self, key: bytes, timeout: float | None
    ) -> _core.Lease | _core.Claim | None:
        until_ns = deadline_ns(timeout)
        if until_ns == 0:
            return self.claim(key)

        def attempt() -> _core.Lease | _core.Claim | _Claimed | None:
            if (lease := self.lookup(key)) is not None:
                return lease
            claim = self._claim_at_once(key)
            if not claim:
                return None if claim is False else _Claimed()
            if (lease := self.lookup(key)) is not None:
                claim.release()  # its maker was faster than our claim
                return lease
            return claim

        try:
            answer = await admitted(self, ("claim", key), attempt, until_ns)
        except _Claimed:
            return None
        return cast("_core.Lease | _core.Claim", answer)

    # -- published blocks by key

    def stat(self, key: Key) -> BlockStat | None:
        """What is known of the block published under the key; counts as no use."""
        found = self._stat(key)
        return None if found is None else BlockStat(*found)

    def invalidate(self, keys: Key | Keys) -> int:
        """Withdraw blocks: from now on they are not found. Returns how many were there.

        Who leases one reads on; its memory is free again after the last of them.
        """
        return self._for_keys(_core.OP_INVALIDATE, keys, False)

    def protect(self, keys: Key | Keys) -> int:
        """Keep blocks from being evicted; returns how many were there."""
        return self._for_keys(_core.OP_PROTECT, keys, True)

    def unprotect(self, keys: Key | Keys) -> int:
        """Let blocks be evicted again; returns how many were there."""
        return self._for_keys(_core.OP_PROTECT, keys, False)

    def _for_keys(self, operation: int, keys: Key | Keys, flag: bool) -> int:
        return sum(self._for_key(operation, key, flag) for key in _each(keys))

    # -- room

    def evict(self, nbytes: int) -> int:
        """Evict what the policy would evict next until `nbytes` are freed; returns bytes freed."""
        return self._evict(nbytes)

    def keep_free(self) -> int:
        """When less of the arena is free than the low watermark, evict up to the high one."""
        geometry = self._geometry()
        low, high = geometry["free_low_bytes"], geometry["free_high_bytes"]
        if low == 0:
            return 0
        free = geometry["arena_bytes"] - self._arena_used()
        return self._evict(high - free) if free < low else 0

    def prefault(self, *, chunk_bytes: int = 64 << 20) -> Prefault:
        """Fill this process's page tables for the whole arena, in the background.

        Later touches then cost no fault. Watch or await it by what is returned.
        """
        return Prefault(self, self._geometry()["arena_bytes"], chunk_bytes)

    # -- reading

    def arena_report(self) -> ArenaReport:
        """What the arena holds, by state and by size of block; O(blocks)."""
        totals, classes, _ = self._arena_numbers()
        slab_bytes, slabs = self._slab_facts()
        hits, misses, unseen, bad = self._counters()
        totals["draining"] = bool(totals["draining"])
        return ArenaReport(
            arena_bytes=self._geometry()["arena_bytes"],
            slab_bytes=slab_bytes,
            slabs=slabs,
            classes=tuple(ArenaClass(*row) for row in classes),
            hits=hits,
            misses=misses,
            hits_unseen=unseen,
            bad_checksums=bad,
            **totals,
        )

    def holdings(self) -> tuple[ArenaHolding, ...]:
        """What each owner leases or writes, of those that hold anything; O(blocks)."""
        _, _, rows = self._arena_numbers()
        pids = {slot: pid for slot, _, _, pid, *_ in self._owner_rows()}
        return tuple(
            ArenaHolding(slot, pids.get(slot, 0), *row) for slot, row in enumerate(rows) if any(row)
        )

    def _make_host_room(self, refusal: Any) -> bool:
        """After a refused reservation: whether evicting gave the host axis what was missing."""
        if (
            not isinstance(refusal, CachePoolError.BudgetExceeded)
            or refusal.resource is not CachePoolResource.HOST
        ):
            return False
        missing = refusal.required - refusal.budget
        return 0 < missing <= self._arena_used() and self._evict(missing) >= missing


class Prefault:
    """A thread that touches the arena in chunks; `done_bytes` of `total_bytes` are mapped."""

    def __init__(self, pool: ArenaPool, total_bytes: int, chunk_bytes: int) -> None:
        bounds.bounded(chunk_bytes, "chunk_bytes", 1, bounds.U64_MAX)
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._chunk_bytes = -(-chunk_bytes // _CHUNK_ALIGN) * _CHUNK_ALIGN
        self._stop = threading.Event()
        self._error: SegmentError | None = None
        self._thread = threading.Thread(
            target=self._work, args=(pool,), name="shmcache-prefault", daemon=True
        )
        self._thread.start()

    def _work(self, pool: ArenaPool) -> None:
        try:
            while self.done_bytes < self.total_bytes and not self._stop.is_set():
                pool._prefault(self.done_bytes, self._chunk_bytes)
                self.done_bytes = min(self.done_bytes + self._chunk_bytes, self.total_bytes)
        except SegmentError as error:
            self._error = error

    def stop(self) -> None:
        """End after the present chunk."""
        self._stop.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; whether it was reached. Raises what stopped it: Closed, HostError."""
        self._thread.join(timeout)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()


def _each(keys: Key | Keys) -> Iterable[Key]:
    if isinstance(keys, np.ndarray):
        return (keys,) if keys.ndim == 1 else list(keys)
    if isinstance(keys, bytes | bytearray | memoryview):
        return (keys,)
    return keys
