"""Prompt caches on disk: saving and loading beside safetensors alone and the hash alone.

All on a file system in memory, in shards of 2 MiB (blocks of 512 tokens, 8 heads of 128, bfloat16)
unless the row says otherwise. The limit of both ways is the hash: every byte is hashed once.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
from prompt_workers import run_workers
from rows import Row

import shmcache as sc

_SHARDS = 256
_SHAPE = (1, 8, 512, 128)
_GIB = 1 << 30
_SMALL_LAYERS, _SMALL_BLOCKS = 40, 250


def run() -> list[Row]:
    """All rows; needs about a minute and 4 GB."""
    folder = Path(tempfile.mkdtemp(prefix="bench-prompt-", dir="/dev/shm"))
    try:
        return [*_throughput(folder), _inspection(folder), *run_workers(folder)]
    finally:
        shutil.rmtree(folder)


def _throughput(folder: Path) -> list[Row]:
    rng = np.random.default_rng(0)
    size = int(np.prod(_SHAPE))
    arrays = [
        rng.integers(0, 1 << 16, size, np.uint16).reshape(_SHAPE).view(ml_dtypes.bfloat16)
        for _ in range(2)
    ]
    total = _SHARDS * sum(array.nbytes for array in arrays)
    pair = dict(zip(("keys", "values"), arrays, strict=True))
    files = folder / "library"
    cache = folder / "cache"
    room = bytearray(sum(array.nbytes for array in arrays))

    def hashed() -> None:
        for _ in range(_SHARDS):
            for array in arrays:
                hashlib.sha256(array.view(np.uint16)).digest()

    def library_saved() -> None:
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir()
        for index in range(_SHARDS):
            safetensors.serialize_file(_specs(pair), files / str(index))

    def library_loaded() -> None:
        for index in range(_SHARDS):
            safetensors.deserialize((files / str(index)).read_bytes())

    def saved() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        _publish(cache, pair, layers=1, blocks=_SHARDS)

    def loaded() -> None:
        with sc.PromptCacheReader.open(cache) as reader:
            for block in reader.manifest.blocks:
                reader.read(block, into=room)

    seconds = {work: _best(work) for work in (hashed, library_saved, library_loaded, saved, loaded)}

    def row(name: str, work: Callable[[], None], peer: Callable[[], None]) -> Row:
        both = seconds[peer] + seconds[hashed]
        return Row(
            name=name,
            value=total / seconds[work] / _GIB,
            unit="GiB/s",
            peer="safetensors, then the hash",
            ratio=both / seconds[work],
            target="at least 0.8",
        )

    ceiling = total / seconds[hashed] / _GIB
    return [
        Row("SHA-256 alone", ceiling, "GiB/s"),
        row("save, synced and published", saved, library_saved),
        row("open and read, verified", loaded, library_loaded),
    ]


def _inspection(folder: Path) -> Row:
    shape = (1, 1, 4, 2)
    pair = dict.fromkeys(("keys", "values"), np.zeros(shape, np.float16))
    cache = folder / "small"
    _publish(cache, pair, layers=_SMALL_LAYERS, blocks=_SMALL_BLOCKS)
    seconds = _best(lambda: sc.inspect_prompt_cache(cache))
    count = _SMALL_LAYERS * _SMALL_BLOCKS
    return Row(f"inspect {count:,} blocks", seconds, "s", "1 s", seconds, "below 1")


def _publish(cache: Path, pair: dict[str, np.ndarray], *, layers: int, blocks: int) -> None:
    """A cache of `layers` x `blocks` equal blocks."""
    tokens, (heads, width) = pair["keys"].shape[2], pair["keys"].shape[1::2]
    identity = sc.PromptCacheModelIdentity
    with sc.PromptCachePublication.begin(cache, False) as publication:
        stored = [
            sc.write_block_shard(
                publication.staging_directory,
                layer * blocks + index,
                pair,
                global_layer=layer,
                representation=sc.CacheRepresentation.KEY_VALUE,
                start=index * tokens,
                end=(index + 1) * tokens,
            )
            for layer in range(layers)
            for index in range(blocks)
        ]
        manifest = sc.PromptCacheManifest(
            schema_version=sc.PROMPT_CACHE_SCHEMA_VERSION,
            model_family="bench",
            effective_model_type="bench",
            checkpoint_fingerprint="1",
            prefix_content_fingerprint="1",
            architecture_fingerprint="1",
            layer_count=layers,
            global_layer_start=0,
            global_layer_end=layers,
            block_size_tokens=tokens,
            batch_size=1,
            total_prefix_tokens=blocks * tokens,
            prefix_sha256=sc.prompt_cache_token_fingerprint(range(blocks * tokens)),
            layer_layout=identity.key_value_layouts([None] * layers, heads, width),
            layer_prefix_offsets=(0,) * layers,
            state_segments=(sc.PromptCacheStateSegment.new("all", range(layers)),),
            sink_tokens=0,
            topology=sc.PromptCacheTopology.default(),
            blocks=tuple(stored),
            state_tensors=(),
        )
        publication.commit(manifest)


def _specs(pair: dict[str, np.ndarray]) -> dict[str, safetensors.TensorSpec]:
    return {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in pair.items()
    }


def _best(work: Callable[[], object], rounds: int = 3) -> float:
    """Seconds of the quickest of some rounds; noise only ever adds."""
    results = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        results.append(time.perf_counter() - started)
    return min(results)
