"""Prompt caches that the tests of this folder share, and the bytes in them.

Payload rule: within one shard the elements count upward from 0 over the first array and go on over
the second, so that every hash can be recomputed; of bfloat16 the count is the raw pattern.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from msgspec.structs import replace

from shmcache import (
    PromptCacheManifest,
    PromptCachePublication,
    PromptCacheReader,
    write_block_shard,
    write_state_shard,
)
from shmcache.prompt.dtypes import DTYPES
from shmcache.prompt.reading import manifest_entries
from tests.policy.samples import hybrid, minimal

MINI_TEXT = (
    b'{"keys":{"dtype":"F32","shape":[1,1,3,2],"data_offsets":[0,24]},'
    b'"values":{"dtype":"F32","shape":[1,1,3,2],"data_offsets":[24,48]}}'
)
MINI_HASH = "29e1889124dc651e7bb488251123910767d042ae6dc47c280ec364655e24ab49"
BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}

Header = dict[str, dict[str, Any]]


def counting(shape: tuple[int, ...], dtype: str, start: int = 0) -> np.ndarray[Any, Any]:
    """An array of a manifest's dtype that counts from `start`."""
    made: np.ndarray[Any, Any] = np.arange(start, start + int(np.prod(shape))).reshape(shape)
    if dtype == "Bfloat16":
        return made.astype(np.uint16).view(ml_dtypes.bfloat16)
    return made.astype(BY_NAME[dtype].numpy)


def shard_bytes(header: Header | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of this header, with any length field."""
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def mini_shard() -> bytes:
    """The example file of the contract: 192 bytes."""
    payload = np.arange(12, dtype="<f4").tobytes()
    return shard_bytes(MINI_TEXT + b" " * 6, payload)


def write_shards(directory: Path, manifest: PromptCacheManifest) -> PromptCacheManifest:
    """Write all shards of a manifest by the payload rule; the manifest with what was written."""
    blocks, tensors = [], []
    for index, block in enumerate(manifest.blocks):
        first = counting(block.first_shape, block.first_dtype)
        second = counting(block.second_shape, block.second_dtype, first.size)
        written = write_block_shard(
            directory,
            index,
            {block.first_array: first, block.second_array: second},
            global_layer=block.global_layer,
            representation=block.representation,
            start=block.start,
            end=block.end,
            rank=block.rank,
        )
        blocks.append(written)
    for index, tensor in enumerate(manifest.state_tensors):
        array = counting(tensor.shape, tensor.dtype)
        written_state = write_state_shard(
            directory, index, array, owner=tensor.owner, role=tensor.role
        )
        tensors.append(written_state)
    return replace(manifest, blocks=tuple(blocks), state_tensors=tuple(tensors))


def publish(
    destination: Path, manifest: PromptCacheManifest | None = None, replacing: bool = False
) -> PromptCacheManifest:
    """Publish a cache by the payload rule, by default the hybrid one; its manifest."""
    with PromptCachePublication.begin(destination, replacing) as publication:
        written = write_shards(publication.staging_directory, manifest or hybrid())
        publication.commit(written)
    return written


def named(namespace: str, manifest: PromptCacheManifest | None = None) -> PromptCacheManifest:
    """A manifest that differs from others by its label only; by default the minimal one."""
    return replace(manifest or minimal(), application_namespace=namespace)


def read_all(reader: PromptCacheReader) -> dict[str, bytes]:
    """Every array that a reader hands out, by shard and name."""
    return {
        f"{entry.shard}/{name}": array.tobytes()
        for entry in manifest_entries(reader.manifest)
        for name, array in reader.read(entry).items()
    }


def expected_arrays(manifest: PromptCacheManifest) -> dict[str, bytes]:
    """What `read_all` must find."""
    found = {}
    for block in manifest.blocks:
        first = counting(block.first_shape, block.first_dtype)
        second = counting(block.second_shape, block.second_dtype, first.size)
        found[f"{block.shard}/{block.first_array}"] = first.tobytes()
        found[f"{block.shard}/{block.second_array}"] = second.tobytes()
    for tensor in manifest.state_tensors:
        found[f"{tensor.shard}/state"] = counting(tensor.shape, tensor.dtype).tobytes()
    return found


def by_hand(
    root: Path, manifest: PromptCacheManifest | bytes, name: str = "generation-test"
) -> Path:
    """A destination without shards, made with plain writes: its generation's directory."""
    generation = root / ".generations" / name
    generation.mkdir(parents=True)
    text = manifest if isinstance(manifest, bytes) else manifest.to_json()
    (generation / "manifest.json").write_bytes(text)
    (root / "CURRENT").write_text(f"{name}\n")
    return generation


def mini_cache(root: Path) -> Path:
    """A destination with the minimal manifest and its shard, made by hand: its generation."""
    generation = by_hand(root, minimal())
    (generation / "block-00000000.safetensors").write_bytes(mini_shard())
    return generation


def tree(root: Path) -> list[str]:
    """Every path below, sorted; directories with a slash."""
    found = []
    for folder, folders, files in os.walk(root):
        base = Path(folder).relative_to(root)
        found += [f"{base / name}/" for name in folders] + [str(base / name) for name in files]
    return sorted(found)
