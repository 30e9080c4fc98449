"""A pool for the life of an ASGI application: FastAPI, Starlette, any server, any worker count.

    app = FastAPI(lifespan=pool_lifespan("llm", CachePoolLimits(...), arena_bytes=16 << 30))

    @app.get("/")
    def answer(request: Request) -> ...:
        pool = request.state.pool

Why         uvicorn spawns its workers, ends slow ones, and has no hooks: an application's lifespan
            is what all servers run in each worker.
Contract    Startup opens the pool or makes it, and supervises it from a thread; the request's state
            has it as `pool`. Shutdown leaves it. The pool is kept: the next start is warm.
            `current_pool()` gives the same handle anywhere else, a new one after a new epoch.
Concurrency Every worker supervises: whichever sees a death first gives back what the dead held.
Death       Of a worker: the others give back what it held. Of all: the pool stays for the next.
Errors      Startup raises what `CacheResidencyPool.open_or_create` does, and the server says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypedDict

from shmcache import CachePoolLimits, CacheResidencyPool
from shmcache.integrations.worker_pool import (
    PoolKeeper,
    current_pool,
    leave_current_pool,
    pool_settings,
    use_pool,
)


class PoolState(TypedDict):
    """What a request's state has."""

    pool: CacheResidencyPool


def pool_lifespan(
    name: str | None = None, limits: CachePoolLimits | None = None, **options: Any
) -> Callable[[Any], AbstractAsyncContextManager[PoolState]]:
    """The lifespan of an application with that pool; without a name, the one `use_pool` told of.

    Options are those of `CacheResidencyPool.create`. Errors: TypeError for a name without limits.
    """
    if (name is None) != (limits is None) or (options and name is None):
        raise TypeError("a pool has a name and limits, or both were told by use_pool()")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[PoolState]:
        if name is not None and limits is not None:
            use_pool(name, limits, **options)
        keeper = PoolKeeper(pool_settings())
        keeper.start()
        try:
            yield {"pool": current_pool()}
        finally:
            keeper.stop()
            leave_current_pool()

    return lifespan


__all__ = ["PoolState", "pool_lifespan"]
