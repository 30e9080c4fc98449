"""What gunicorn's processes do about their pool: two lines of gunicorn.conf.py.

    from shmcache.integrations.gunicorn_hooks import *
    use_pool("llm", CachePoolLimits(...), arena_bytes=16 << 30)

Why         The arbiter lives longest, so it makes the pool and watches over it; a worker attaches
            before its first request, and leaves when it is told to go.
Contract    The hooks of those names. A configuration with hooks of its own calls these in them.
            Nothing depends on them: `current_pool()` in a worker is right without any, with
            `preload_app` or not, and after a reload, an upgrade (USR2), or a SIGKILL of anyone. The
            pool is kept when the arbiter exits, so that the next one starts warm; `use_pool(...)`
            and `remove_on_exit()` remove it, unless another arbiter or worker is there.
Concurrency `child_exit` only tells the watching thread: an arbiter must not wait for a lock.
Death       Of the arbiter: its workers see it and end; the pool stays.
Errors      `when_ready` raises what the pool raises, and the arbiter ends with it: in an upgrade
            the old one goes on. A worker that cannot attach is not stopped here: its first request
            tries again, and gets the error.
Units       While a reload or an upgrade overlaps, up to four times as many workers are owners:
            `owners_max` must cover them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from shmcache import CacheResidencyPool
from shmcache.errors import CachePoolError, SegmentError
from shmcache.integrations.worker_pool import (
    PoolKeeper,
    current_pool,
    leave_current_pool,
    pool_settings,
    use_pool,
)

_log = logging.getLogger("shmcache.integrations")


class _Arbiter:
    """What this process, or the one that it was forked from, does as an arbiter."""

    keeper: PoolKeeper | None = None
    removes = False


def remove_on_exit() -> None:
    """Let the last arbiter's orderly exit remove the pool with all that is in it."""
    _Arbiter.removes = True


def when_ready(server: Any) -> None:
    """In the arbiter: make or find the pool, and watch it from now on."""
    keeper = PoolKeeper(pool_settings())
    keeper.start()
    _Arbiter.keeper = keeper


def post_fork(server: Any, worker: Any) -> None:
    """In a new worker: attach, so that its first request need not."""
    try:
        current_pool()
    except (SegmentError, CachePoolError) as error:
        _log.warning("worker %d starts without its pool: %s", os.getpid(), error)


def child_exit(server: Any, worker: Any) -> None:
    """In the arbiter, after a worker has ended in any way."""
    if _Arbiter.keeper is not None:
        _Arbiter.keeper.sweep_soon()


def worker_exit(server: Any, worker: Any) -> None:
    """In a worker that ends in order; gunicorn calls it in the arbiter as well, for lost ones."""
    if worker.pid == os.getpid():
        leave_current_pool()


def on_exit(server: Any) -> None:
    """In an arbiter that ends in order: stop watching; remove the pool if so wished.

    Not when another arbiter of the same upgrade goes on (`reexec_pid`: a newer one, `master_pid`:
    an older one), nor while live workers have it.
    """
    keeper, _Arbiter.keeper = _Arbiter.keeper, None
    if keeper is None:
        return
    keeper.stop()
    if _Arbiter.removes and not server.reexec_pid and not server.master_pid:
        with contextlib.suppress(SegmentError):  # in use, or gone already
            CacheResidencyPool.destroy(pool_settings().name)


__all__ = [
    "child_exit",
    "on_exit",
    "post_fork",
    "remove_on_exit",
    "use_pool",
    "when_ready",
    "worker_exit",
]
