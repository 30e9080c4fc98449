"""How gunicorn serves serve_model.py: two workers on one pool of 256 MiB. POOL names it."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported: a core per worker

from serve_model import BLOCK_TOKENS, MODEL, TOKENS_MAX

from shmcache.integrations.gunicorn_hooks import *
from shmcache.workloads.serving import serving_pool_sizes

bind = "127.0.0.1:8000"
workers = 2
preload_app = True  # one copy of the weights

# While a reload overlaps there are twice as many workers.
limits, options = serving_pool_sizes(
    MODEL.shape,
    servers=2 * workers,
    tokens_max=TOKENS_MAX,
    arena_bytes=256 << 20,
    block_tokens=BLOCK_TOKENS,
)
use_pool(os.environ.get("POOL", "serve-model"), limits, **options)
