"""The one pool of a server's worker processes: told once, opened by each worker when it needs it.

    use_pool("llm", CachePoolLimits(...), arena_bytes=16 << 30)    # in the launcher
    pool = current_pool()                                          # in any worker, per request

Why         Workers are forked, spawned, recycled and killed by servers that know nothing of pools.
            What they all inherit is the environment, so that is where the pool's settings are.
Contract    `current_pool` answers with this process's handle, and makes it on first use: attaches
            to the pool, or makes it when nobody has. A pool that was retired, recreated or closed
            is opened again. A `PoolKeeper` only makes things faster: without one, the dead are
            swept by whoever attaches, is refused or waits.
Concurrency Any thread, and after a fork: a child's first use attaches it as an owner of its own.
Death       A killed worker is reclaimed by a keeper within milliseconds, or by anyone later. A
            killed launcher leaves a pool that the next one finds, with every published block.
Errors      LookupError when nobody told of a pool; else those of `open_or_create` (Refused when the
            pool that exists has other sizes than were told).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import Any, Final, Literal, Protocol

import msgspec

from shmcache import CachePoolLimits, CacheResidencyPool, Supervisor, bounds
from shmcache.errors import CachePoolError, SegmentError

ENVIRONMENT: Final = "SHMCACHE_POOL"  # holds PoolSettings as JSON
_AGAIN_S = 1.0  # until a keeper looks for a pool that went

_log = logging.getLogger("shmcache.integrations")


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pool is called and how it is made; `options` as of `CacheResidencyPool.create`."""

    name: str
    device_bytes: int
    host_bytes: int
    transfer_in_flight_bytes: int
    disk_bytes: int
    options: dict[str, Any] = {}

    @property
    def limits(self) -> CachePoolLimits:
        """As the pool takes them. Errors: those of CachePoolLimits."""
        return CachePoolLimits(
            self.device_bytes, self.host_bytes, self.transfer_in_flight_bytes, self.disk_bytes
        )

    def open(self) -> CacheResidencyPool:
        """Attach to the pool, or make it. Errors: as `CacheResidencyPool.open_or_create`."""
        return CacheResidencyPool.open_or_create(self.name, self.limits, **self.options)


def use_pool(name: str, limits: CachePoolLimits, **options: Any) -> PoolSettings:
    """Tell this process, and all it starts from now on, which pool to use; opens nothing.

    Options are those of `CacheResidencyPool.create`, which must be JSON: numbers and names.
    Errors: ValueError for a name no pool can have; TypeError for what is no JSON.
    """
    settings = PoolSettings(
        bounds.pool_name(name),
        limits.device_bytes,
        limits.host_bytes,
        limits.transfer_in_flight_bytes,
        limits.disk_bytes,
        options,
    )
    os.environ[ENVIRONMENT] = msgspec.json.encode(settings).decode()
    return settings


def pool_settings() -> PoolSettings:
    """What `use_pool` told this process or one it descends from.

    Errors: LookupError when none did; ValueError when the environment was told something else.
    """
    try:
        text = os.environ[ENVIRONMENT]
    except KeyError:
        raise LookupError(f"no pool to use: call use_pool(), or set {ENVIRONMENT}") from None
    try:
        return msgspec.json.decode(text, type=PoolSettings)
    except msgspec.DecodeError as error:
        raise ValueError(f"{ENVIRONMENT} is not what use_pool() writes: {error}") from error


class PoolSource(Protocol):
    """What opens a pool: `PoolSettings`, or another module's way to say which one."""

    @property
    def name(self) -> str:
        """Of the pool."""

    def open(self) -> CacheResidencyPool:
        """A handle of this process."""


class _Handles:
    """This process's handles by name; a forked child's first use of one attaches it by itself.

    The lock is made anew in a forked child, where its holder is gone.
    """

    def __init__(self) -> None:
        self.pools: dict[str, CacheResidencyPool] = {}
        self.told: PoolSource | None = None  # in this process, before the environment
        self.left_at_exit = 0  # the process that will leave
        self.lock = threading.RLock()  # a signal handler may ask, too

    def renew_lock(self) -> None:
        self.lock = threading.RLock()


_handles = _Handles()
os.register_at_fork(after_in_child=_handles.renew_lock)


def this_process(source: PoolSource) -> CacheResidencyPool:
    """This process's one handle on the pool, opened when there is none that can be used."""
    with _handles.lock:
        _leave_at_exit()
        pool = _handles.pools.get(source.name)
        if pool is None or not _usable(pool):
            if pool is not None:
                _let_go(pool)
            _handles.pools[source.name] = pool = source.open()
        return pool


def current_pool() -> CacheResidencyPool:
    """This process's handle on the pool that `use_pool` told of (see the module)."""
    return this_process(_handles.told or pool_settings())


def use_pool_here(source: PoolSource | None) -> None:
    """Let `current_pool` open this in this process and those it forks; None: as before."""
    _handles.told = source


def leave_current_pool() -> None:
    """Close this process's handles; `current_pool` would open another.

    An orderly exit does this by itself.
    """
    with _handles.lock:
        while _handles.pools:
            _let_go(_handles.pools.popitem()[1])


def _leave_at_exit() -> None:
    """Also where `atexit` is not run: a child of multiprocessing runs finalizers of its own."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _handles.left_at_exit != os.getpid():
        _handles.left_at_exit = os.getpid()
        util.Finalize(None, leave_current_pool, exitpriority=0)


def _usable(pool: CacheResidencyPool) -> bool:
    return not pool.closed and pool.state == "active"


def _let_go(pool: CacheResidencyPool) -> None:
    """Close it, ended or not; blocks that somebody still writes keep it until they are dropped."""
    with contextlib.suppress(BufferError):
        pool.close()


class PoolKeeper:
    """Makes sure that a pool is there and supervised, from a thread of the launcher.

    Why         Deaths are noticed at once, not with the next attach; a poisoned pool is replaced by
                an empty epoch; one that was removed is made again.
    Concurrency Several on one pool, in several processes, do no harm. Stopped by its own process
                only: what a forked child inherits does nothing.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        on_poison: Literal["report", "recreate"] = "recreate",
    ) -> None:
        self._settings = settings
        self._on_poison = on_poison
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._supervisor: Supervisor | None = None
        self._thread = threading.Thread(target=self._keep, name="shmcache-keeper", daemon=True)

    def start(self) -> None:
        """Open or make the pool, then watch it. Errors: as `current_pool`; nothing runs then."""
        self._watch(self._found())
        self._thread.start()

    def sweep_soon(self) -> None:
        """A process is known to have died: look now. Never waits, never raises."""
        supervisor = self._supervisor
        if supervisor is not None and os.getpid() == self._pid:
            supervisor.sweep_soon()

    def stop(self) -> None:
        """End the watching; idempotent, and nothing in a forked child."""
        if os.getpid() != self._pid or self._thread.ident is None:
            return
        self._stopping.set()
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.stop()
        self._thread.join()

    def _found(self) -> CacheResidencyPool:
        """A pool to watch: as an observer where it cannot be used any more."""
        try:
            return self._settings.open()
        except CachePoolError.Poisoned:
            if self._on_poison == "report":
                raise
            return CacheResidencyPool.observe(self._settings.name)

    def _watch(self, pool: CacheResidencyPool) -> None:
        with pool:  # left at once: the supervisor has a handle of its own, without a slot
            self._supervisor = Supervisor(pool, on_poison=self._on_poison)

    def _keep(self) -> None:
        while self._supervisor is not None:
            with contextlib.closing(self._supervisor) as supervisor:
                if not self._stopping.is_set():  # set after this: its setter stops the supervisor
                    supervisor.run()
            self._supervisor = None
            while self._supervisor is None and not self._stopping.wait(_AGAIN_S):
                self._look_again()

    def _look_again(self) -> None:
        try:
            self._watch(self._found())
        except (SegmentError, CachePoolError) as error:
            _log.warning("pool %r cannot be supervised: %s", self._settings.name, error)
