"""CacheSession: one live model cache in one worker, within the budgets of its options and pool.

Why         A cache outgrows its device. Sealed blocks move to host memory and to files and come
            back when attention asks for them; what each tier holds is admitted before it is there.
Contract    The behaviour is contract/residency.md part B. A session is a manager of the pool; its
            id is the manager's. A handle is one user of it: `share` makes another, and the session
            ends with the last handle.
Shapes      [batch, heads, tokens, width]; [batch, tokens, width] for a latent. Any batch size, the
            same for all blocks of a layer.
Concurrency Every method may be called from any thread. Growth and shrinking wait for each other;
            leases do not wait for them and may be cancelled by them.
Death       A sweep deletes the files of a killed worker, then releases their charge; all else at
            once. A forked child's copy raises RuntimeError.
Errors      `CacheResidencyError`; `SegmentError` of the pool; ValueError for a closed session.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex

from shmcache.bounds import i64, instance, u64, usize
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.policy.manifest import PromptCacheManifest
from shmcache.policy.prefix_keys import Tokens, token_ids
from shmcache.policy.prompt_identity import (
    PromptCacheDescriptor,
    PromptCacheModelIdentity,
    PromptCacheOptions,
)
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolUsage
from shmcache.prompt.files import StrPath
from shmcache.session.arena_memory import ArenaHostMemory
from shmcache.session.backend import BlockSpec, CacheBackend, HostMemory
from shmcache.session.fixed_state import FixedState
from shmcache.session.gauges import snapshot
from shmcache.session.numpy_backend import NumpyBackend, PrivateHostMemory
from shmcache.session.options import PagedCacheOptions
from shmcache.session.parts import SessionParts
from shmcache.session.prefix_options import PrefixSharing
from shmcache.session.prompt_loading import open_prompt_cache
from shmcache.session.reading import CacheBlockLease
from shmcache.session.records import BlockFile
from shmcache.session.scans import CachePiece
from shmcache.session.sharing import CacheSharingReport
from shmcache.states.storage import CacheStoragePhase
from shmcache.telemetry import CacheResidencyReport


class CacheSession:
    """A handle on one live cache (see the module).

    `pool` is the one to join; None takes that of the options, or makes one for this session alone.
    `backend` is the engine's memory, numpy's by default; `memory` says where host copies lie: in
    the pool's arena for a session with `sharing`, else in private memory. `sharing` lets it publish
    prefixes and adopt those of others.
    """

    def __init__(
        self,
        pool: CacheResidencyPool | None = None,
        *,
        model: PromptCacheModelIdentity,
        options: PagedCacheOptions,
        backend: CacheBackend[Any] | None = None,
        memory: HostMemory | None = None,
        sharing: PrefixSharing | None = None,
        session_id: int | None = None,
    ) -> None:
        instance(options, PagedCacheOptions, "options")
        if session_id is not None:
            u64(session_id, "session_id")
        own = None
        if pool is not None:
            options = options.with_pool(pool)
        elif options.pool is None:
            own = options.create_pool()
            options = options.with_pool(own)
        assert options.pool is not None
        try:
            parts = SessionParts(
                options.pool,
                model,
                options,
                backend or NumpyBackend(),
                memory or _usual_memory(options.pool, model, sharing),
                session_id,
                sharing,
                own,
            )
        except BaseException:
            if own is not None:
                own.close()
            raise
        self._hold(parts)

    def _hold(self, parts: SessionParts) -> None:
        self._parts = parts
        self._core = parts.core
        parts.add_handle()
        self._dropped = weakref.finalize(self, parts.drop_handle)

    def share(self) -> Self:
        """Another handle on the same session, which lives until the last one is closed."""
        with self._core.lock:
            self._check_open()
            other = type(self).__new__(type(self))
            other._hold(self._parts)
        return other

    @property
    def id(self) -> int:
        """The session's id, and its manager's in the pool."""
        return self._core.id

    @property
    def pool(self) -> CacheResidencyPool:
        """The pool it is charged to."""
        return self._core.pool

    @property
    def options(self) -> PagedCacheOptions:
        """Its limits, the pool included."""
        return self._core.options

    @property
    def generation(self) -> int:
        """How often blocks have left so far (u64, wraps)."""
        return self._core.generation

    # Growing --------------------------------------------------------------------------------------

    def append(self, layer: int, *arrays: Any) -> None:
        """Append tokens to a layer: keys and values, a latent and rotary keys, or keys alone.

        Contract: the arrays are copied. All tokens are appended, or none.

        Errors: ArrayMismatch, BudgetExceeded, LiveDiskRequired, Pool, Runtime.
        """
        parts, core = self._parts, self._core
        with self._ordered():
            parts.tails.append(core.layers[usize(layer, "layer")], arrays)

    def import_block(
        self, layer: int, start: int, end: int, spec: BlockSpec, file: BlockFile
    ) -> None:
        """Let a layer continue with a block of a prompt cache, which is read when it is leased.

        Contract: the file is not charged and not deleted, and the block survives sliding discards.

        Errors: InvalidTokenRange unless it starts where the layer ends; ArrayMismatch.
        """
        core = self._core
        with self._ordered():
            found = core.layers[usize(layer, "layer")]
            self._parts.tails.import_block(found, start, end, spec, file)

    def position(self, layer: int) -> int:
        """How many tokens the layer has, those included that have been discarded."""
        with self._core.lock:
            self._check_open()
            return self._parts.tails.position(usize(layer, "layer"))

    # Sharing --------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, *, timeout: float | None = 0) -> int:
        """Adopt the longest published prefix of `tokens`, leased and not copied; returns how many
        tokens the session then has.

        Contract: `tokens` are the ids from position 0 on. A session that has grown goes on where it
        ends, if that is a multiple of the block size; elsewhere nothing is adopted. An engine hands
        in all but the last token, which it must compute to get logits. While another live worker
        computes the next block, it is waited for up to `timeout` seconds, and so on to the end of
        the prefix; if its worker dies, the waiter is told at once, to compute it itself. Without
        sharing nothing matches.

        Errors: ValueError when they do not continue the tokens that the session knows.
        """
        with self._ordered():
            matching = self._parts.matching
            return 0 if matching is None else matching.match(tokens, timeout)

    def feed(self, tokens: Tokens, *, start: int = 0) -> None:
        """Tell the ids of the tokens from position `start` on, before they are appended.

        Why: blocks are shared under the names of their tokens; one whose tokens are not known when
        it is sealed stays private. Ids may be told again: the whole prompt is always right.

        Errors: ValueError when they differ from known ids (blocks would get wrong names), or leave
        a gap; nothing has changed.
        """
        with self._ordered():
            if self._parts.sharing is not None:
                self._parts.sharing.feed(tokens, usize(start, "start"))

    def put_state(self, position: int, states: Mapping[int, Sequence[Any]]) -> bool:
        """Publish the fixed state of all layers that have any, as it is after `position` tokens.

        Why: a recurrent or convolution layer goes on only from its state, so a prefix of such a
        model can be adopted where somebody has put one. `states`: for each of those layers its
        arrays in the order of its policy, None for one that is not there. They are copied.

        Contract: `position` is a multiple of the block size whose tokens are known. Returns whether
        the state is in the pool now; False where there was no room, or nothing is published.

        Errors: ArrayMismatch; ValueError for another position, or a session without sharing.
        """
        with self._ordered():
            return self._fixed_state().put(u64(position, "position"), states)

    def state(self) -> dict[int, tuple[Any, ...]] | None:
        """The fixed state that came with the prefix that was adopted last, as it was put; None if
        none did. Errors: ValueError for a session without sharing.
        """
        with self._ordered():
            return self._fixed_state().get()

    def _fixed_state(self) -> FixedState:
        if self._parts.fixed_state is None:
            raise ValueError("this session shares nothing: make it with sharing=PrefixSharing(...)")
        return self._parts.fixed_state

    def sharing_report(self) -> CacheSharingReport:
        """What was published and adopted so far; all zero without sharing."""
        sharing = self._parts.sharing
        with self._core.lock:
            return CacheSharingReport() if sharing is None else sharing.report()

    # Prompt caches --------------------------------------------------------------------------------

    def save_prompt_cache(
        self,
        destination: StrPath,
        *,
        tokens: Tokens,
        descriptor: PromptCacheDescriptor,
        options: PromptCacheOptions | None = None,
    ) -> PromptCacheManifest:
        """Publish the session's prefix as a prompt cache; what was published.

        Contract: `tokens` are the ids from position 0 on. As many of them are saved as all layers
        have, whatever block or tail they are in; of a model with fixed state, those up to the state
        that is in the pool and was put last. One block at a time is in memory, charged as a
        transfer; the files are nobody's charge. After an error the destination is as it was.

        Errors: PromptCacheError when the descriptor is another model's, or what the session has is
        no whole prefix; InvalidTokenRange when a window has left a gap behind the protected prefix;
        ValueError for other tokens than the session knows; PromptCachePersistenceError; Pool,
        Runtime.
        """
        with self._ordered():
            ids, sharing = token_ids(tokens), self._parts.sharing
            if sharing is not None:
                sharing.check_known(ids)
            options = options or PromptCacheOptions()
            return self._parts.saving.save(destination, ids, descriptor, options)

    @classmethod
    def load_prompt_cache(
        cls,
        destination: StrPath,
        pool: CacheResidencyPool | None = None,
        *,
        tokens: Tokens,
        descriptor: PromptCacheDescriptor,
        model: PromptCacheModelIdentity,
        options: PagedCacheOptions,
        backend: CacheBackend[Any] | None = None,
        memory: HostMemory | None = None,
        sharing: PrefixSharing | None = None,
        session_id: int | None = None,
        timeout: float | None = 60,
    ) -> Self:
        """A session that begins with a prompt cache of exactly these tokens.

        Contract: with `sharing`, whole blocks lie in the arena, read by one worker and leased by
        all; a block that another worker reads just now is waited for up to `timeout` seconds.
        Otherwise blocks are read when they are leased. No byte is used before its hash agreed.

        Errors: PromptCacheError when it is another model's, checkpoint's or prefix's, or its blocks
        are others; PromptCachePersistenceError when it is damaged; those of a new session and of
        `append`.
        """
        ids = token_ids(tokens)
        cache = open_prompt_cache(destination, ids, descriptor, model, options, sharing)
        try:
            session = cls(
                pool,
                model=model,
                options=options,
                backend=backend,
                memory=memory,
                sharing=sharing,
                session_id=session_id,
            )
            try:
                session._parts.load(cache, ids, timeout)
            except BaseException:
                session.close()
                raise
        except BaseException:
            cache.close()
            raise
        return session

    # Reading --------------------------------------------------------------------------------------

    def lease(self, id: CacheBlockId) -> CacheBlockLease:
        """Bring a block to the device and keep it there until the lease is released.

        Errors: Lifecycle(MissingBlock), BudgetExceeded, LiveDiskRequired, Pool, Runtime,
        IoExecution; DiskOperationCancelled when the cache was shortened meanwhile.
        """
        self._check_open()
        return self._parts.reader.lease(instance(id, CacheBlockId, "id"))

    def visible(self, layer: int, start: int, end: int) -> list[CacheBlockId]:
        """The sealed blocks that positions from `start` up to `end` need, in order; the protected
        prefix is always among them.
        """
        self._check_open()
        return self._parts.reader.visible(usize(layer, "layer"), start, end)

    def window(self, ids: list[CacheBlockId]) -> Iterator[CacheBlockLease]:
        """Lease each block in turn, and the next one ahead if the device has room for both.

        A lease is released when the next one is asked for. Close the iterator to stop early.
        """
        self._check_open()
        return self._parts.reader.window(ids)

    def scan(self, layer: int, *, prefill: bool = False) -> Iterator[CachePiece]:
        """All that the layer's next token sees, block by block, then the tail.

        Each piece is valid until the next one is asked for.

        Errors: as `lease`.
        """
        self._check_open()
        return self._parts.scans.scan(usize(layer, "layer"), prefill)

    def tail(self, layer: int) -> CachePiece | None:
        """The layer's unsealed tokens, valid until the layer grows or shrinks."""
        with self._core.lock:
            self._check_open()
            return self._parts.scans.tail(usize(layer, "layer"))

    # Shrinking ------------------------------------------------------------------------------------

    def truncate(self, layer: int, end: int) -> None:
        """Forget the layer's tokens from position `end` on.

        Errors: InvalidTokenRange; Lifecycle(UnexpectedLeaseCount) when somebody reads what would
        go; those of `lease`.
        """
        with self._ordered():
            core, found = self._core, self._core.layers[usize(layer, "layer")]
            before = core.end_of(layer)
            try:
                self._parts.shrinking.truncate(found, i64(end, "end"))
            finally:  # it may have told of a file when all was done
                if core.shared is not None and core.end_of(layer) == end:
                    core.shared.cut(layer, before, end)

    def discard_sliding(self, layer: int) -> int:
        """Drop the blocks that the layer's window has left behind; how many.

        Contract: nothing is dropped of a layer that sees everything, nor while the options retain
        blocks for persistence. The protected prefix, leased and imported blocks stay. An engine
        calls it when the attention of a step is done.
        """
        core = self._core
        with self._ordered():
            start = self._parts.scans.visible_start(usize(layer, "layer"))
            if start is None or core.options.retains_discarded_for_persistence:
                return 0
            return self._parts.shrinking.discard(core.layers[layer], start)

    def remove(self, id: CacheBlockId) -> None:
        """Drop one block. Errors: Lifecycle(MissingBlock, BlockLeased)."""
        with self._ordered():
            self._parts.shrinking.remove(instance(id, CacheBlockId, "id"))

    def clear(self) -> None:
        """Drop all blocks and tails; what was counted stays.

        Returns when nothing of them is under way any more. Errors: Lifecycle(BlockLeased).
        """
        with self._ordered():
            self._parts.shrinking.clear()

    # Moving ---------------------------------------------------------------------------------------

    def rebalance(
        self, required: CacheBlockId | None = None, *, allow_recent: bool = False
    ) -> None:
        """Bring every tier back under its budget; growth and leases do this by themselves.

        Errors: what a background write failed with, once; BudgetExceeded, LiveDiskRequired, Pool.
        """
        self._check_open()
        self._parts.balance.restore(required, allow_recent=allow_recent)

    def demote(self, id: CacheBlockId) -> None:
        """Move a block one tier down and wait for it: from the device to the host, or, if it has a
        file, to disk; from the host to disk.

        Errors: Lifecycle(BlockLeased), Storage, BudgetExceeded, LiveDiskRequired, Pool, Runtime.
        """
        self._check_open()
        self._parts.moves.demote(instance(id, CacheBlockId, "id"))

    def flush(self) -> None:
        """Wait until no write is under way. Errors: Runtime of a write that failed."""
        self._parts.moves.flush()

    # Telling --------------------------------------------------------------------------------------

    def blocks(self, layer: int | None = None) -> list[CacheBlockId]:
        """Every sealed block, or those of one layer, in identity order."""
        with self._core.lock:
            self._check_open()
            return sorted(self._core.records if layer is None else self._core.layer_ids(layer))

    def phase(self, id: CacheBlockId) -> CacheStoragePhase:
        """Where a block is. Errors: Lifecycle(MissingBlock)."""
        with self._core.lock:
            return self._core.record(id).storage.phase

    def tier(self, id: CacheBlockId) -> CacheTier:
        """The tier it counts in. Errors: Lifecycle(MissingBlock)."""
        return self.phase(id).tier

    def usage(self) -> CachePoolUsage:
        """What the pool is told that this session holds."""
        with self._core.lock:
            return self._core.sums().usage()

    def report(self) -> CacheResidencyReport:
        """Gauges of this instant, counters and peaks, as a copy."""
        with self._core.lock:
            return snapshot(self._core)

    # Ending ---------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this handle was closed."""
        return not self._dropped.alive

    def close(self) -> None:
        """Let go of this handle; the last one ends the session: its work, its files, its charges.

        Errors: Io when a file could not be deleted, after everything else was done.
        """
        if self._dropped.detach() is not None:
            self._parts.close_handle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CacheSession {self.id}{' closed' if self.closed else ''}>"

    def __copy__(self) -> NoReturn:
        raise TypeError("use share() for another handle on a session")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a session belongs to its process: it cannot be pickled")

    def _ordered(self) -> AbstractContextManager[object]:
        """What growth and shrinking take; checked first, a forked child's copy may be locked."""
        self._check_open()
        return self._core.order

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("this handle of the session is closed")
        self._core.lock.check_process()


def _usual_memory(
    pool: CacheResidencyPool, model: PromptCacheModelIdentity, sharing: PrefixSharing | None
) -> HostMemory:
    return PrivateHostMemory() if sharing is None else ArenaHostMemory.for_model(pool, model)
