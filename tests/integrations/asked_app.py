"""The example application, with a request that never ends: it waits for room that never comes."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from shmcache import CachePoolUsage
from shmcache.integrations.worker_pool import current_pool, pool_settings

serve_model: Any = importlib.import_module("serve_model")  # of docs/examples


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """As `serve_model.app`; POST /wait holds a block and a byte, and waits for all bytes."""
    if environ["PATH_INFO"] != "/wait":
        answer: Iterable[bytes] = serve_model.app(environ, start_response)
        return answer
    pool = current_pool()
    everything = CachePoolUsage(device_bytes=pool_settings().device_bytes)
    with (
        pool.allocate(64),
        pool.reserve(CachePoolUsage(device_bytes=1)),
        pool.reserve(everything, timeout=3600),
    ):
        raise AssertionError("there was room")
