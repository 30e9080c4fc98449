"""The layers of a session's model: which arrays their blocks have, and what may be appended.

Why: an array of the wrong shape must be refused when it is handed in, by name and number, and not
be found by an attention kernel a thousand tokens later.

Shapes: [batch, heads, tokens, width], or [batch, tokens, width] for a latent. A layer of keys only
has one array here; what a prompt-cache file stores beside it is the business of whoever writes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shmcache.bounds import instance
from shmcache.errors import CacheResidencyError
from shmcache.policy.block_arrays import block_arrays
from shmcache.policy.identity import CacheBlockId, CacheRankIdentity, CacheRepresentation
from shmcache.policy.layer import (
    LayerCachePolicy,
    LayerCachePolicyKeyOnly,
    LayerCachePolicyKeyOnlyWithFixedState,
)
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.session.backend import ArraySpec, BlockSpec, CacheBackend


class Layer(NamedTuple):
    """One layer with attention. `group`: layers of equal policy share it, by its first layer."""

    global_layer: int
    group: int
    representation: CacheRepresentation
    names: tuple[str, ...]
    heads: tuple[int, ...]
    widths: tuple[int, ...]
    window: int | None

    def spec(self, like: BlockSpec, tokens: int) -> BlockSpec:
        """A block of as many tokens, with the batch and element types of `like`."""
        return BlockSpec(
            tuple(
                ArraySpec(array.name, (*array.shape[:-2], tokens, array.shape[-1]), array.dtype)
                for array in like.arrays
            )
        )


class ModelLayers:
    """The layers of a model that this rank owns, and the identity of their blocks."""

    def __init__(self, model: PromptCacheModelIdentity, session_id: int) -> None:
        instance(model, PromptCacheModelIdentity, "model").validate()
        self.session_id = session_id
        self.prefix_tokens = model.sink_tokens
        self._rank: CacheRankIdentity | None = model.topology.cache_rank_identity()
        self._layers: dict[int, Layer] = {}
        groups: dict[LayerCachePolicy, int] = {}
        for number, policy in enumerate(model.layer_layout, model.global_layer_start):
            arrays = block_arrays(policy)
            if arrays is None or policy.attention is None:
                continue
            key_only = isinstance(
                policy, LayerCachePolicyKeyOnly | LayerCachePolicyKeyOnlyWithFixedState
            )
            count = 1 if key_only else 2
            self._layers[number] = Layer(
                global_layer=number,
                group=groups.setdefault(policy, number),
                representation=arrays.representation,
                names=arrays.names[:count],
                heads=arrays.heads,
                widths=arrays.widths[:count],
                window=policy.attention.window,
            )

    def __getitem__(self, global_layer: int) -> Layer:
        layer = self._layers.get(global_layer)
        if layer is None:
            raise ValueError(f"layer {global_layer} of this model has no attention to cache")
        return layer

    def __iter__(self) -> Any:
        return iter(self._layers.values())

    def block_id(self, layer: Layer, start: int, end: int) -> CacheBlockId:
        """The identity of a block. Errors: `CacheResidencyError.InvalidTokenRange`."""
        if not 0 <= start < end:
            raise CacheResidencyError.InvalidTokenRange(start, end)
        return CacheBlockId(
            session_id=self.session_id,
            global_layer=layer.global_layer,
            representation=layer.representation,
            start=start,
            end=end,
            rank=self._rank,
        )

    def is_prefix(self, end: int) -> bool:
        """Whether a block that ends there belongs to the protected prefix."""
        return end <= self.prefix_tokens


def appended_spec(backend: CacheBackend[Any], layer: Layer, arrays: Sequence[Any]) -> BlockSpec:
    """What was handed in, checked against the layer.

    Errors: `CacheResidencyError.ArrayMismatch`, with the array's name.
    """
    if len(arrays) != len(layer.names):
        raise _mismatch(layer, f"{len(layer.names)} arrays are needed, not {len(arrays)}")
    specs = []
    batch = tokens = None
    for name, width, array in zip(layer.names, layer.widths, arrays, strict=True):
        shape, dtype = backend.describe(array)
        if len(shape) == len(layer.heads) + 3 and tokens is None:
            batch, tokens = shape[0], shape[-2]
        expected = (batch, *layer.heads, tokens, width)
        if shape != expected or not batch:
            raise _mismatch(layer, f"{name} has shape {shape}, expected {expected}")
        specs.append(ArraySpec(name, shape, dtype))
    return BlockSpec(tuple(specs))


def appended_tokens(
    backend: CacheBackend[Any], layer: Layer, arrays: Sequence[Any], like: BlockSpec
) -> int:
    """How many tokens were handed in, checked against the layer's blocks.

    Errors: `CacheResidencyError.ArrayMismatch`, with the array's name.
    """
    tokens = None
    for array, known in zip(arrays, like.arrays, strict=False):
        shape, dtype = backend.describe(array)
        if tokens is None and len(shape) == len(known.shape):
            tokens = shape[-2]
        expected = (*known.shape[:-2], tokens, known.shape[-1])
        if shape != expected or dtype != known.dtype:
            tokens = None
            break
    if tokens is None or len(arrays) != len(like.arrays):
        spec = appended_spec(backend, layer, arrays)
        check_like(layer, spec, like)
        raise AssertionError("what does not agree was not found again")
    return tokens


def check_like(layer: Layer, spec: BlockSpec, earlier: BlockSpec) -> None:
    """Blocks of one layer have one batch size and one element type each.

    Errors: `CacheResidencyError.ArrayMismatch`.
    """
    for new, old in zip(spec.arrays, earlier.arrays, strict=True):
        if new.shape[0] != old.shape[0] or new.dtype != old.dtype:
            raise _mismatch(
                layer,
                f"{new.name} has batch {new.shape[0]} of {new.dtype},"
                f" the layer has {old.shape[0]} of {old.dtype}",
            )


def _mismatch(layer: Layer, message: str) -> CacheResidencyError.ArrayMismatch:
    return CacheResidencyError.ArrayMismatch(f"layer {layer.global_layer}: {message}")
