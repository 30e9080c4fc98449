"""Workers that load one prompt cache: what they read, what they hold, how long it takes.

Each worker is a process of its own, which waits for a line before it loads and tells what it has
done. The cache is on a file system in memory, so that the hash is the limit and not a disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rows import Row

import shmcache as sc

_WORKERS = 8
_LAYERS, _HEADS, _WIDTH, _TOKENS, _BLOCKS = 4, 8, 128, 128, 512  # 1 GiB
_GIB = 1 << 30


def run_workers(folder: Path) -> list[Row]:
    """Rows of one loader alone, and of eight at once."""
    cache = folder / "workers"
    size = _save(cache)
    one, _, _ = _load(cache, 1, size)
    many, read, held = _load(cache, _WORKERS, size)
    target = "1: read once, held once"
    ratio = many / one
    return [
        Row("a session loads a cache of 1 GiB", one, "s"),
        Row("8 workers load it at once", many, "s", "one alone", ratio),
        Row(
            "payload bytes that 8 workers read",
            read / _GIB,
            "GiB",
            "the files",
            read / size,
            target,
        ),
        Row("arena that 8 workers hold", held / _GIB, "GiB", "the files", held / size, target),
    ]


def _given() -> dict[str, Any]:
    identity = sc.PromptCacheModelIdentity
    model = identity.new(
        "bench",
        "bench",
        "sha256:bench",
        layer_count=_LAYERS,
        global_layer_start=0,
        global_layer_end=_LAYERS,
        sink_tokens=0,
        topology=sc.PromptCacheTopology.default(),
        layer_layout=identity.key_value_layouts([None] * _LAYERS, heads=_HEADS, head_dim=_WIDTH),
        layer_prefix_offsets=[0] * _LAYERS,
        state_segments=[sc.PromptCacheStateSegment.new("all", range(_LAYERS))],
    )
    return {"model": model, "options": sc.PagedCacheOptions(_TOKENS, 2 * _GIB, _GIB, 1)}


def _identity() -> dict[str, Any]:
    given = _given()
    descriptor = sc.PromptCacheDescriptor.from_model_identity(given["model"], "1", "1", 1)
    return {"tokens": range(_TOKENS * _BLOCKS), "descriptor": descriptor}


def _save(cache: Path) -> int:
    shape = (1, _HEADS, _TOKENS, _WIDTH)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 15, int(np.prod(shape)), np.uint16)
    array = bits.reshape(shape).view(ml_dtypes.bfloat16)
    with sc.CacheSession(**_given()) as session:
        for _ in range(_BLOCKS):
            for layer in range(_LAYERS):
                session.append(layer, array, array)
        saved = session.save_prompt_cache(cache, **_identity())
    return sum(block.logical_bytes for block in saved.blocks)


def _load(cache: Path, count: int, size: int) -> tuple[float, int, int]:
    """Seconds until all have loaded, payload bytes that they read, and what the arena holds."""
    name = f"bench-prompt-{os.getpid()}"
    limits = sc.CachePoolLimits(2 * _GIB, 2 * size, _GIB, 0)
    with sc.CacheResidencyPool.create(name, limits, arena_bytes=2 * size) as pool:
        command = [sys.executable, __file__, name, str(cache)]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(count)
        ]
        try:
            for worker in workers:
                _line(worker)
            started = time.perf_counter()
            for worker in workers:
                _tell(worker)
            read = sum(json.loads(_line(worker)) for worker in workers)
            seconds = time.perf_counter() - started
            held = pool.arena_report().used_bytes
            for worker in workers:
                _tell(worker)
                worker.wait()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    sc.CacheResidencyPool.destroy(name)
    return seconds, read, held


def _line(worker: subprocess.Popen[bytes]) -> bytes:
    assert worker.stdout is not None
    return worker.stdout.readline()


def _tell(worker: subprocess.Popen[bytes]) -> None:
    assert worker.stdin is not None
    worker.stdin.write(b"\n")
    worker.stdin.flush()


def _worker(name: str, cache: str) -> None:
    with sc.CacheResidencyPool.attach(name) as pool:
        given, identity = _given(), _identity()
        print(flush=True)
        sys.stdin.readline()
        before = _bytes_read()
        with sc.CacheSession.load_prompt_cache(
            cache,
            pool,
            **given,
            **identity,
            backend=sc.NumpyBackend(reads_host=True),
            sharing=sc.PrefixSharing(checkpoint_fingerprint="1", dtype=ml_dtypes.bfloat16),
        ):
            print(_bytes_read() - before, flush=True)
            sys.stdin.readline()


def _bytes_read() -> int:
    """What this process has read by system calls, headers and manifests included."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2])
