"""The demo's decoder: time to the first token after a prefix of 2,048 tokens, with a warm pool.

One process with one BLAS thread, as a worker of the demo. Figures beside those without the pool, of
the same run. The real model is measured where its packages are installed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from rows import Row

from shmcache import CacheResidencyPool
from shmcache.errors import WorkloadError
from shmcache.workloads.decoder import ONE_BLAS_THREAD
from shmcache.workloads.doc_chats import DOCS, conversations, doc_pages
from shmcache.workloads.serving import ModelServer, create_serving_pool
from shmcache.workloads.weights import Model, load_model

_PREFIX_TOKENS = 2048
_QUESTIONS = 5
_ARENA_BYTES = 256 << 20


class _Times(msgspec.Struct):
    """Seconds to the first token: without the pool, on an empty one, on a warm one."""

    alone: float
    cold: float
    warm: float


def run() -> list[Row]:
    """All rows; a minute with the real model."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("tiny", "smollm2"):
            try:
                load_model(kind, Path(cache))
            except WorkloadError.PackageMissing:
                continue
            ran = subprocess.run(
                [sys.executable, __file__, kind, cache],
                env={**os.environ, **ONE_BLAS_THREAD},
                stdout=subprocess.PIPE,
                check=True,
            )
            rows += _rows(kind, msgspec.json.decode(ran.stdout, type=_Times))
    return rows


def _rows(kind: str, times: _Times) -> list[Row]:
    peer = "the same without a pool"
    return [
        Row(
            f"{kind}: first token, warm",
            times.warm * 1e3,
            "ms",
            peer,
            times.warm / times.alone,
            "at most 0.25x",
        ),
        Row(
            f"{kind}: first token, empty pool",
            times.cold * 1e3,
            "ms",
            peer,
            times.cold / times.alone,
        ),
    ]


def _measure(model: Model) -> _Times:
    """Every question is about one page: only the first one has to compute it."""
    talks = conversations(
        doc_pages(DOCS),
        model.tokenizer,
        seed=1,
        count=_QUESTIONS,
        turns=1,
        pages_max=1,
        page_tokens=_PREFIX_TOKENS,
    )
    for talk in talks:
        talk.ask(model.tokenizer)
    name = f"bench-demo-{os.getpid()}"
    pool = create_serving_pool(
        name, model.shape, servers=1, tokens_max=2 * _PREFIX_TOKENS, arena_bytes=_ARENA_BYTES
    )
    try:
        server = ModelServer(pool, model)
        server.answer_alone(talks[0].tokens[:200], tokens_max=1)  # maps the weights
        alone = [server.answer_alone(t.tokens, tokens_max=1).first_token_s for t in talks[:2]]
        cold, *warm = (server.answer(t.tokens, tokens_max=1).first_token_s for t in talks)
    finally:
        pool.close()
        CacheResidencyPool.destroy(name)
    return _Times(statistics.median(alone), cold, statistics.median(warm))


if __name__ == "__main__":
    measured = _measure(load_model(sys.argv[1], Path(sys.argv[2])))
    sys.stdout.buffer.write(msgspec.json.encode(measured))
