"""What Python reads from outside, as targets of a fuzzer: bytes in, a typed error or a value out.

Each target is a function of bytes; `ERRORS` says what it may raise. `seeds` gives inputs to begin
with, made by the code that writes such files. `under_atheris.py` runs one under a fuzzer; without
it, `test_fuzz.py` runs the kept inputs and changes of the seeds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from shmcache import CachePoolLimits, CacheResidencyPool, prompt_cache_generations
from shmcache.cli.sizes import parse_size
from shmcache.errors import (
    DumpError,
    PromptCacheError,
    PromptCachePersistenceError,
    TraceError,
    WorkloadError,
)
from shmcache.pool.dump import read_dump, write_dump
from shmcache.prompt.header import read_shard_header
from shmcache.prompt.paths import resolve_prompt_cache_root
from shmcache.prompt.reading import decode_manifest
from shmcache.workloads.model_config import read_geometry
from shmcache.workloads.traces import TraceReader
from tests.fuzz.json_mutator import mutated
from tests.policy import samples

Target = Callable[[bytes], object]
REQUESTS_MAX = 50


def _file(data: bytes) -> Path:
    """The input as a file; one place, written anew each time."""
    path = _folder() / "input.json"
    path.write_bytes(data)
    return path


def _folder() -> Path:
    global _made
    if _made is None:
        _made = tempfile.TemporaryDirectory(prefix="shmcache-fuzz-")
    return Path(_made.name)


_made: tempfile.TemporaryDirectory[str] | None = None


def manifest(data: bytes) -> object:
    """A prompt cache's manifest.json."""
    return decode_manifest(data)


def shard(data: bytes) -> object:
    """The header of a safetensors file; its length is put before it, and some bytes behind."""
    path = _file(len(data).to_bytes(8, "little") + data + bytes(8))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_shard_header(descriptor, path)
    finally:
        os.close(descriptor)


def current(data: bytes) -> object:
    """CURRENT, which names the active generation."""
    root = _folder() / "cache"
    (root / "generations").mkdir(parents=True, exist_ok=True)
    (root / "CURRENT").write_bytes(data)
    prompt_cache_generations(root)
    return resolve_prompt_cache_root(root)


def trace(data: bytes) -> object:
    """A recorded trace, plain or gzip."""
    stream = io.BufferedReader(io.BytesIO(data))
    reader = TraceReader(stream, "input")
    return [request for request, _ in zip(reader, range(REQUESTS_MAX), strict=False)]


def size(data: bytes) -> object:
    """A size of the command line."""
    return parse_size(data.decode("utf-8", "replace"))


def config(data: bytes) -> object:
    """A model's config.json."""
    return read_geometry(_file(data))


def dump(data: bytes) -> object:
    """A dump of all tables. Its hash would stop every input, so a right one is put before it."""
    line = b"shmcache-dump 1 " + hashlib.sha256(data).hexdigest().encode() + b"\n"
    return read_dump(_file(line + data))


ERRORS: dict[Target, tuple[type[Exception], ...]] = {
    manifest: (PromptCacheError, PromptCachePersistenceError),
    shard: (PromptCachePersistenceError,),
    current: (PromptCachePersistenceError,),
    trace: (TraceError,),
    size: (ValueError,),
    config: (WorkloadError,),
    dump: (DumpError,),
}
TARGETS = {target.__name__: target for target in ERRORS}


JSON = ("manifest", "shard", "trace", "config", "dump")  # whose inputs are JSON, or begin with it


def seeds(name: str) -> Iterator[bytes]:
    """Inputs that mean something, and a few that nearly do."""
    yield from _SEEDS[name]()


def _manifests() -> Iterator[bytes]:
    yield samples.minimal().to_json()
    yield samples.hybrid().to_json()


def _shards() -> Iterator[bytes]:
    header = {
        "keys": {"dtype": "F16", "shape": [1, 2], "data_offsets": [0, 4]},
        "values": {"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]},
        "__metadata__": {"format": "pt"},
    }
    yield json.dumps(header).encode()


def _traces() -> Iterator[bytes]:
    yield json.dumps(
        {"timestamp": 1, "input_length": 700, "output_length": 2, "hash_ids": [1, 2]}
    ).encode()


def _configs() -> Iterator[bytes]:
    dense = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 64, "torch_dtype": "bfloat16",
    }  # fmt: skip
    sliding = {
        **dense, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    latent = {
        **dense, "model_type": "deepseek_v3", "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "q_lora_rank": 16, "v_head_dim": 8, "qk_nope_head_dim": 8,
    }  # fmt: skip
    hybrid = {
        **dense, "model_type": "qwen3_next", "head_dim": 16, "full_attention_interval": 2,
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4,
        "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    for model in (dense, sliding, latent, hybrid, {"model_type": "x", "text_config": dense}):
        yield json.dumps(model).encode()


def _dumps() -> Iterator[bytes]:
    with CacheResidencyPool(CachePoolLimits(1, 1 << 20, 1, 0), arena_bytes=1 << 16) as pool:
        path = _folder() / "seed.dump"
        write_dump(pool, path, locked=True)
        yield path.read_bytes().split(b"\n", 1)[1]


_SEEDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "manifest": _manifests,
    "shard": _shards,
    "current": lambda: iter((b"generation-1\n", b"../x\n", b"\n")),
    "trace": _traces,
    "size": lambda: iter((b"16GiB", b"1.5 MB", b"-1", b"1e400")),
    "config": _configs,
    "dump": _dumps,
}


def mutated_input(name: str, data: bytes, size_max: int, seed: int) -> bytes:
    """Another input like this one. A dump's tables follow its header, and stay as they are."""
    if name != "dump":
        return mutated(data, size_max, seed)
    header, newline, tables = data.partition(b"\n")
    return mutated(header, size_max, seed) + newline + tables


def run(name: str, data: bytes) -> None:
    """One input. Raises what is no answer."""
    target = TARGETS[name]
    try:
        target(data)
    except ERRORS[target]:
        return
