"""The same model as a FastAPI application, for uvicorn's workers.

pip install 'shmcache[export]' fastapi uvicorn
MODEL=tiny uvicorn --workers 2 serve_fastapi:app
"""

import os
import threading

from fastapi import FastAPI, HTTPException, Request
from prometheus_client import CollectorRegistry, make_asgi_app
from serve_model import BLOCK_TOKENS, MODEL, TOKENS_MAX, generate

from shmcache import CachePoolError, SegmentError
from shmcache.integrations.asgi import pool_lifespan
from shmcache.integrations.prometheus import PoolCollector
from shmcache.workloads.serving import serving_pool_sizes

POOL = os.environ.get("POOL", "serve-model")
limits, options = serving_pool_sizes(
    MODEL.shape,
    servers=8,
    tokens_max=TOKENS_MAX,
    arena_bytes=256 << 20,
    block_tokens=BLOCK_TOKENS,
)
app = FastAPI(lifespan=pool_lifespan(POOL, limits, **options))
registry = CollectorRegistry()
registry.register(PoolCollector(POOL))
app.mount("/metrics", make_asgi_app(registry))
one_at_a_time = threading.Lock()  # a model has one core


@app.post("/generate")
def answer(asked: dict, request: Request) -> dict:
    """Runs in a thread of the server's: waiting here stops nobody else."""
    try:
        with one_at_a_time:
            said = generate(asked)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    except (CachePoolError, SegmentError) as error:
        raise HTTPException(503, str(error)) from error
    return said | {"owners": len(request.state.pool.owners())}
