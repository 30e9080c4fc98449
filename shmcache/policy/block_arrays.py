"""Which two arrays a sealed block of a layer holds: names, shapes, representation."""

from __future__ import annotations

from typing import NamedTuple

from shmcache.policy.identity import CacheRepresentation
from shmcache.policy.layer import (
    LayerCachePolicy,
    LayerCachePolicyCompressedLatentRotary,
    LayerCachePolicyKeyOnly,
    LayerCachePolicyKeyOnlyWithFixedState,
)


class BlockArrays(NamedTuple):
    """Both arrays of a block, for any batch and number of tokens."""

    representation: CacheRepresentation
    names: tuple[str, str]
    heads: tuple[int, ...]  # one number, or none where all heads share a latent
    widths: tuple[int, int]

    def shapes(self, batch_size: int, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """[batch, heads, tokens, width], without heads for a latent."""
        lead = (batch_size, *self.heads, tokens)
        return (*lead, self.widths[0]), (*lead, self.widths[1])


def block_arrays(layer: LayerCachePolicy) -> BlockArrays | None:
    """The arrays of this layer's blocks; None for a layer without attention.

    A key-only layer stores values of width 1, so that every block has two arrays.
    """
    if layer.attention is None:
        return None
    first, second = layer.dimensions
    if isinstance(layer, LayerCachePolicyCompressedLatentRotary):
        representation = CacheRepresentation.COMPRESSED_LATENT_ROTARY
        return BlockArrays(representation, ("latent", "rotary_key"), (), (first, second))
    key_only = isinstance(layer, LayerCachePolicyKeyOnly | LayerCachePolicyKeyOnlyWithFixedState)
    widths = (second, 1 if key_only else second)
    return BlockArrays(CacheRepresentation.KEY_VALUE, ("keys", "values"), (first,), widths)
