"""The parts of one session, put together, and its life from the first handle to the last."""

from __future__ import annotations

import contextlib
from typing import Any

from shmcache.errors import CacheResidencyError
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.pool.pool import CacheResidencyPool
from shmcache.prompt.reading import PromptCacheReader
from shmcache.session.backend import CacheBackend, HostCopyOperation, HostMemory
from shmcache.session.balance import Balance
from shmcache.session.core import SessionCore
from shmcache.session.demotions import Demotions
from shmcache.session.disk import DiskTier, Leaving, bytes_left, remove_files
from shmcache.session.fixed_state import FixedState
from shmcache.session.generations import Generations, Retiring
from shmcache.session.matching import Matching
from shmcache.session.options import PagedCacheOptions
from shmcache.session.prefix_options import PrefixSharing
from shmcache.session.prompt_loading import PromptLoading
from shmcache.session.prompt_saving import PromptSaving
from shmcache.session.reading import Reader
from shmcache.session.records import BlockFile
from shmcache.session.scans import Scans
from shmcache.session.shared_groups import TokenIds
from shmcache.session.sharing import Sharing
from shmcache.session.shrinking import Shrinking
from shmcache.session.tails import Tails


class SessionParts:
    """See the module. `own` is a pool made for this session, to be closed with it."""

    def __init__(
        self,
        pool: CacheResidencyPool,
        model: PromptCacheModelIdentity,
        options: PagedCacheOptions,
        backend: CacheBackend[Any],
        memory: HostMemory,
        session_id: int | None,
        sharing: PrefixSharing | None,
        own: CacheResidencyPool | None,
    ) -> None:
        core = self.core = SessionCore(pool, model, options, backend, memory, session_id)
        self.demotions = Demotions(core)
        self.disk = DiskTier(core)
        try:
            self.disk.open_directory()
        except BaseException:
            core.end()
            raise
        self.balance = Balance(core, self.demotions, self.disk)
        self.reader = Reader(core, self.demotions, self.disk, self.balance)
        self.scans = Scans(core, self.reader)
        self.generations = Generations(core, self.demotions, self.disk)
        self.shrinking = Shrinking(core, self.generations, self.reader)
        self.tails = Tails(core, self.balance, self.shrinking)
        self.sharing = self.matching = self.fixed_state = None
        if sharing is not None:
            try:
                self.sharing = core.shared = Sharing(core, self.demotions, model, sharing)
            except BaseException:
                core.end()
                raise
            self.matching = Matching(core, self.sharing)
            self.fixed_state = FixedState(core, self.sharing)
        self.moves = Moves(core, self.demotions, self.disk)
        self.saving = PromptSaving(core, self.sharing, model)
        self._own = own
        self._cache: PromptCacheReader | None = None
        self._handles = 0

    def load(self, cache: PromptCacheReader, tokens: TokenIds, timeout: float | None) -> None:
        """Begin with a prompt cache, which is kept open while blocks rest on its files.

        Errors: those of `PromptLoading.load`; the cache is then the caller's to close.
        """
        loading = PromptLoading(self.core, self.tails, self.sharing, cache, timeout)
        if loading.load(tokens):
            self._cache = cache
        else:
            cache.close()

    def add_handle(self) -> None:
        """One more user; of a session that is not closed."""
        self._handles += 1

    def close_handle(self) -> None:
        """One user less, explicitly; nothing in a forked child.

        Errors: Io, after everything was done.
        """
        if self.core.lock.is_foreign:
            return
        with self.core.order:
            with self.core.lock:
                self._handles -= 1
                if self._handles or self.core.closed:
                    return
                retiring, files = self._mark_closed()
            try:
                with contextlib.suppress(CacheResidencyError):  # of work that nobody wants
                    self.generations.retire(retiring)
                self.disk.stop()
            finally:
                try:
                    remove_files(files)
                finally:
                    self._leave(files, wait=True)

    def drop_handle(self) -> None:
        """The same from a finalizer: nothing is waited for."""
        self.core.lock.later(self._drop)

    def _drop(self) -> None:
        self._handles -= 1
        if self._handles or self.core.closed:
            return
        _, files = self._mark_closed()
        with contextlib.suppress(CacheResidencyError):
            remove_files(files)
        self.disk.stop_soon()
        self._leave(files, wait=False)

    def _mark_closed(self) -> tuple[Retiring, list[BlockFile]]:
        """With the lock held: nothing more is begun, written files are deleted by their writer."""
        core = self.core
        retiring = self.generations.advance()
        core.closed = True
        files = [record.storage.backing for record in core.records.values()]
        return retiring, [file for file in files if file is not None]

    def _leave(self, files: list[BlockFile], *, wait: bool) -> None:
        if self.sharing is not None:
            self.sharing.clear()
        self.disk.close_directory(wait=wait)
        if self._cache is not None:
            self._cache.close()
        self.core.end(bytes_left(files))
        if self._own is not None:
            self._own.close()


class Moves:
    """What a user may move by hand, and wait for."""

    def __init__(self, core: SessionCore, demotions: Demotions, disk: DiskTier) -> None:
        self._core = core
        self._demotions = demotions
        self._disk = disk

    def demote(self, id: CacheBlockId) -> None:
        """One tier down (`CacheSession.demote`)."""
        shared = self._core.shared
        if shared is not None:
            with self._core.lock:
                wanted = shared.wants(id)
            if wanted:
                shared.demanded(id)
            with self._core.lock:
                if wanted and self._core.record(id).storage.tier is CacheTier.HOST:
                    return  # a session that reads the arena has it there now
        with self._core.lock:
            on_device, operation = self._begin(id)
        if operation is not None:
            self._demotions.finish(operation)
        elif not on_device:
            gone = self._disk.leave_host(id)
            if not isinstance(gone, Leaving):
                self._disk.wait_write(gone)

    def _begin(self, id: CacheBlockId) -> tuple[bool, HostCopyOperation | None]:
        """Whether it was on the device, and the copy to wait for. With the lock held.

        A function of its own: an error raised while waiting must not keep the block's memory.
        """
        core = self._core
        core.check_open()
        core.check_removable(id)
        storage = core.records[id].storage
        if storage.tier is not CacheTier.DEVICE:
            return False, None
        if storage.host_demotion is not None:
            return True, storage.host_demotion
        if storage.backing is not None:
            core.release_device_to_disk(core.records[id])
            return True, None
        return True, self._demotions.begin(id)

    def flush(self) -> None:
        """Wait for every write (`CacheSession.flush`)."""
        while True:
            with self._core.lock:
                ticket = self._disk.pending_write()
            if ticket is None:
                return
            self._disk.wait_write(ticket)
