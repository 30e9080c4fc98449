"""What a manifest must satisfy in itself, in the order in which failures are reported.

Why: a cache with a hole, or with arrays of another shape, gives wrong output without any error. A
manifest that passes describes, for every owned layer, exactly the tokens that its attention needs.

Contract: every failure is a `PromptCacheError.Malformed` with a code, but `Policy` for a symbolic
shape that does not resolve. Not checked: dtype names beyond equality, sizes against shapes (the
shard's header is), the prefix hash against tokens (`validate_compatibility` does).

Units: the frontier of a layer is the number of prefix tokens it has processed.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from shmcache.bounds import I32_MAX
from shmcache.errors import CachePolicyError, PromptCacheError
from shmcache.policy.attention import AnyAttentionPolicy
from shmcache.policy.block_arrays import BlockArrays, block_arrays
from shmcache.policy.fingerprints import is_sha256_hex
from shmcache.policy.identity import CacheRankIdentity
from shmcache.policy.prompt_identity import dimensions_agree
from shmcache.policy.state import AnyStateTensorOwner, StateTensorOwnerLayer, StateTensorPolicy
from shmcache.policy.topology import validate_segments

if TYPE_CHECKING:
    from shmcache.policy.manifest import (
        PromptCacheBlock,
        PromptCacheManifest,
        PromptCacheStateTensor,
    )

_ORDINARY_NAME: Final = r"(?!\.\.?(?:/|\Z))[^/\\]+"
_SAFE_PATH: Final = re.compile(rf"{_ORDINARY_NAME}(?:/{_ORDINARY_NAME})*")

is_safe_shard_path: Final = _SAFE_PATH.fullmatch
"""A match if a text is a relative path of ordinary names. Only the text is judged, no file."""


def validate_manifest(manifest: PromptCacheManifest) -> None:
    """Check a manifest whose schema version is ours.

    Errors: `PromptCacheError.Malformed`, `Policy`.
    """
    if not (
        dimensions_agree(manifest, manifest.batch_size)
        and manifest.prefix_content_fingerprint
        and manifest.block_size_tokens > 0
        and manifest.total_prefix_tokens > 0
        and is_sha256_hex(manifest.prefix_sha256)
    ):
        raise PromptCacheError.Malformed("global_dimensions")
    manifest.topology.validate()
    owned = len(manifest.layer_layout)
    validate_segments(manifest.state_segments, owned, PromptCacheError.Malformed)
    frontiers = _frontiers(manifest)
    _validate_layers(manifest)
    _validate_blocks(manifest, frontiers)
    _validate_state_tensors(manifest, frontiers)
    _validate_coverage(manifest, frontiers)


def _frontiers(manifest: PromptCacheManifest) -> list[int]:
    frontiers = []
    for layer, offset in enumerate(manifest.layer_prefix_offsets, manifest.global_layer_start):
        frontier = manifest.total_prefix_tokens + offset
        if offset > 0 or frontier < 0:
            raise PromptCacheError.Malformed("frontier", f"layer {layer} has offset {offset}")
        frontiers.append(frontier)
    return frontiers


def _validate_layers(manifest: PromptCacheManifest) -> None:
    for layer, policy in enumerate(manifest.layer_layout, manifest.global_layer_start):
        try:
            policy.validate()
        except CachePolicyError as error:
            raise PromptCacheError.Malformed("layer_policy", f"layer {layer}: {error}") from error


# Blocks -------------------------------------------------------------------------------------------


def _validate_blocks(manifest: PromptCacheManifest, frontiers: list[int]) -> None:
    rank = manifest.topology.cache_rank_identity()
    arrays = [block_arrays(policy) for policy in manifest.layer_layout]
    previous = (-1, 0, 0)
    for position, block in enumerate(manifest.blocks):
        place = (block.global_layer, block.start, block.end)
        index = block.global_layer - manifest.global_layer_start
        if not 0 <= index < len(arrays):
            fault = "block_layer_range"
        elif not _fields_are_sound(block, frontiers[index]):
            fault = "block_fields"
        elif place <= previous:
            fault = "block_order"
        else:
            fault = _array_fault(block, arrays[index], manifest.batch_size, rank)
        if fault:
            layer, start, end = place
            where = f"block {position}, tokens {start} to {end} of layer {layer}"
            raise PromptCacheError.Malformed(fault, where)
        previous = place


def _fields_are_sound(block: PromptCacheBlock, frontier: int) -> bool:
    return bool(
        0 <= block.start < block.end <= frontier
        and block.logical_bytes
        and block.first_shape
        and block.second_shape
        and is_sha256_hex(block.payload_sha256)
        and is_safe_shard_path(block.shard)
    )


def _array_fault(
    block: PromptCacheBlock,
    arrays: BlockArrays | None,
    batch_size: int,
    rank: CacheRankIdentity | None,
) -> str:
    """The code of what is wrong with the block's arrays; empty if nothing is."""
    tokens = block.end - block.start
    if arrays is None:
        return "block_stateless_layer"
    if tokens > I32_MAX:
        return "block_token_count"
    shapes = (block.first_shape, block.second_shape)
    if block.representation is not arrays.representation or shapes != arrays.shapes(
        batch_size, tokens
    ):
        return "block_geometry"
    if block.rank != rank:
        return "block_rank"
    if (block.first_array, block.second_array) != arrays.names:
        return "block_arrays"
    return "block_arrays" if block.first_dtype != block.second_dtype else ""


# State tensors ------------------------------------------------------------------------------------


def _validate_state_tensors(manifest: PromptCacheManifest, frontiers: list[int]) -> None:
    listed = set()
    for tensor in manifest.state_tensors:
        key = (tensor.owner, tensor.role)
        if key in listed:
            raise PromptCacheError.Malformed("state_duplicate", f"{tensor.owner} {tensor.role}")
        listed.add(key)
    expected = []
    for index, policy in enumerate(manifest.layer_layout):
        owner = StateTensorOwnerLayer(manifest.global_layer_start + index)
        frontier = frontiers[index]
        for rule in policy.fixed_state():
            if (frontier and rule.is_required_for(frontier)) or (owner, rule.role) in listed:
                expected.append((owner, rule, frontier))
    if len(listed) != len(expected):
        message = f"{len(listed)} tensors are listed, {len(expected)} expected"
        raise PromptCacheError.Malformed("state_count", message)
    for position, (tensor, (owner, rule, frontier)) in enumerate(
        zip(manifest.state_tensors, expected, strict=True)
    ):
        if not _tensor_is_sound(tensor, owner, rule, manifest.batch_size, frontier):
            raise PromptCacheError.Malformed("state_entry", f"tensor {position} of {owner}")


def _tensor_is_sound(
    tensor: PromptCacheStateTensor,
    owner: AnyStateTensorOwner,
    rule: StateTensorPolicy,
    batch_size: int,
    frontier: int,
) -> bool:
    if tensor.owner != owner or tensor.role != rule.role:
        return False
    try:
        shape = rule.resolved_shape(batch_size, frontier)
    except CachePolicyError as error:
        raise PromptCacheError.Policy(error) from error
    return bool(
        tensor.shape == shape
        and rule.accepts_dtype_name(tensor.dtype)
        and tensor.logical_bytes
        and is_sha256_hex(tensor.payload_sha256)
        and tensor.array == "state"
        and is_safe_shard_path(tensor.shard)
    )


# Coverage -----------------------------------------------------------------------------------------


def _validate_coverage(manifest: PromptCacheManifest, frontiers: list[int]) -> None:
    spans: dict[int, list[tuple[int, int]]] = {}
    for block in manifest.blocks:
        spans.setdefault(block.global_layer, []).append((block.start, block.end))
    for index, policy in enumerate(manifest.layer_layout):
        layer = manifest.global_layer_start + index
        if fault := _gap(policy.attention, sorted(spans.get(layer, ())), frontiers[index]):
            raise PromptCacheError.Malformed(fault, f"layer {layer}, frontier {frontiers[index]}")


def _gap(attention: AnyAttentionPolicy | None, spans: list[tuple[int, int]], frontier: int) -> str:
    """The code of what a layer's blocks lack; empty if they hold all that attention needs.

    A sliding layer may keep more history than its window, never less.
    """
    if attention is None:
        return "coverage_stateless" if spans else ""
    if not spans:
        return "coverage_missing" if frontier else ""
    window = attention.window
    required = 0 if window is None else max(0, frontier - (window - 1))
    if spans[0][0] > required:
        return "coverage_start"
    if any(start != end for (_, end), (start, _) in pairwise(spans)):
        return "coverage_gap"
    return "coverage_end" if spans[-1][1] != frontier else ""
