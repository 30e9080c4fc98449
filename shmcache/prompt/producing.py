"""Write the shards of a prompt cache, and get the manifest's entries for them.

Why: names of files, spellings of element types, sizes and hashes in a manifest must be those of the
files. Here they come from the arrays that were written.

Contract: each file is durable when its function returns. The caller brings what only it knows:
layers, tokens, ranks, roles. A manifest lists blocks in the order of layer and start.

Errors: those of `write_shard`; ValueError, TypeError for values outside a manifest's domains.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmcache.bounds import usize
from shmcache.policy.identity import CacheRankIdentity, CacheRepresentation
from shmcache.policy.manifest import PromptCacheBlock, PromptCacheStateTensor
from shmcache.policy.state import AnyStateTensorOwner
from shmcache.policy.state_kinds import AnyStateTensorRole
from shmcache.prompt.dtypes import DTYPES
from shmcache.prompt.files import StrPath
from shmcache.prompt.shard import Array, write_shard

_NAMES = {
    CacheRepresentation.KEY_VALUE: ("keys", "values"),
    CacheRepresentation.COMPRESSED_LATENT_ROTARY: ("latent", "rotary_key"),
}


def write_block_shard(
    directory: StrPath,
    index: int,
    arrays: Mapping[str, Array],
    *,
    global_layer: int,
    representation: CacheRepresentation,
    start: int,
    end: int,
    rank: CacheRankIdentity | None = None,
) -> PromptCacheBlock:
    """Store both arrays of a block; `index` is its place in the manifest."""
    first, second = _NAMES[representation]
    shard = f"block-{usize(index, 'index'):08}.safetensors"
    both = {first: arrays[first], second: arrays[second]}
    stored = write_shard(Path(directory) / shard, both, durable=True)
    return PromptCacheBlock(
        global_layer=global_layer,
        representation=representation,
        start=start,
        end=end,
        rank=rank,
        shard=shard,
        first_array=first,
        second_array=second,
        first_shape=stored.arrays[first].shape,
        second_shape=stored.arrays[second].shape,
        first_dtype=DTYPES[stored.arrays[first].dtype].name,
        second_dtype=DTYPES[stored.arrays[second].dtype].name,
        logical_bytes=stored.payload_bytes,
        payload_sha256=stored.payload_sha256,
    )


def write_state_shard(
    directory: StrPath,
    index: int,
    array: Any,
    *,
    owner: AnyStateTensorOwner,
    role: AnyStateTensorRole,
) -> PromptCacheStateTensor:
    """Store a tensor that is no attention; `index` is its place in the manifest."""
    shard = f"state-{usize(index, 'index'):08}.safetensors"
    stored = write_shard(Path(directory) / shard, {"state": array}, durable=True)
    placed = stored.arrays["state"]
    return PromptCacheStateTensor(
        owner=owner,
        role=role,
        shard=shard,
        array="state",
        shape=placed.shape,
        dtype=DTYPES[placed.dtype].name,
        logical_bytes=stored.payload_bytes,
        payload_sha256=stored.payload_sha256,
    )
