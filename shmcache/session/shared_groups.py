"""Layers that share published blocks, and the keys of those blocks.

Why: a prefix of n tokens is n / block_tokens keys, not times layers. Layers of equal policy form a
group; one block of the arena holds a group for one range of tokens. A group that is too large for
one block is cut into several groups.

Shapes: batch 1; see slices.py for the order of bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shmcache.policy.identity import CacheBlockId
from shmcache.policy.prefix_keys import KEY_BYTES, PrefixKeys
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.session.backend import ArraySpec, BlockSpec
from shmcache.session.layers import Layer, ModelLayers
from shmcache.session.prefix_options import PrefixSharing
from shmcache.session.slices import (
    SLICES_LAYOUT,
    Bytes,
    class_bytes,
    layer_groups,
    slices_per_block,
    stride,
)

TokenIds: TypeAlias = npt.NDArray[np.uint32]


class SharedGroup:
    """One group, the `number`th. `keys` are those of the prefix as far as its tokens are known.

    `live`: the leased blocks by their place in the prefix, as long as an array of one is alive.
    """

    __slots__ = (
        "_names",
        "capacity_bytes",
        "keys",
        "layers",
        "live",
        "nbytes",
        "number",
        "spec",
        "stride",
        "window",
    )

    def __init__(
        self, number: int, layers: Sequence[Layer], spec: BlockSpec, names: PrefixKeys
    ) -> None:
        self.number = number
        self.layers = tuple(layers)
        self.window = layers[0].window
        self.spec = spec
        self.stride = stride(spec)
        self.nbytes = len(layers) * self.stride
        self.capacity_bytes = class_bytes(self.nbytes)
        self.keys: list[bytes] = []
        self.live: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        self._names = names

    def chain(self, tokens: TokenIds) -> list[bytes]:
        """The keys of all full blocks of `tokens`, which continue the known prefix."""
        known, size = len(self.keys), self._names.block_tokens
        if len(tokens) // size <= known:
            return self.keys
        parent = self.keys[-1] if known else None
        made = self._names.chain(tokens[known * size :], parent).tobytes()
        return self.keys + [made[at : at + KEY_BYTES] for at in range(0, len(made), KEY_BYTES)]

    def first_seen(self, position: int, prefix_tokens: int) -> tuple[int, int]:
        """Which blocks the token at `position` sees: those before the first number, which hold
        the protected prefix, and those from the second one on.
        """
        size = self._names.block_tokens
        if self.window is None:
            return 0, 0
        sinks = -(-min(prefix_tokens, position) // size)
        return sinks, max(position - self.window, 0) // size


def shared_groups(
    model: PromptCacheModelIdentity,
    layers: ModelLayers,
    sharing: PrefixSharing,
    block_tokens: int,
    block_bytes_max: int,
) -> list[SharedGroup]:
    """The groups of a model, in the order of their first layers.

    Errors: TypeError, ValueError for what no key can be made of.
    """
    groups: list[SharedGroup] = []
    for numbers in layer_groups(model):
        first = layers[numbers[0]]
        spec = _spec(first, sharing, block_tokens)
        count = slices_per_block(spec, block_bytes_max)
        for at in range(0, len(numbers), count):
            members = [layers[number] for number in numbers[at : at + count]]
            names = PrefixKeys(
                model,
                checkpoint_fingerprint=sharing.checkpoint_fingerprint,
                dtype=sharing.dtype.name,
                layout=_layout(sharing, members),
                block_tokens=block_tokens,
                salt=sharing.salt,
                group=len(groups),
                rank=model.topology.cache_rank_identity(),
            )
            groups.append(SharedGroup(len(groups), members, spec, names))
    return groups


def block_index(id: CacheBlockId, block_tokens: int) -> int | None:
    """Which full block of the prefix it is; None for a shorter one."""
    whole = id.start % block_tokens == 0 and id.end - id.start == block_tokens
    return id.start // block_tokens if whole else None


def _spec(layer: Layer, sharing: PrefixSharing, tokens: int) -> BlockSpec:
    return BlockSpec(
        tuple(
            ArraySpec(name, (1, *layer.heads, tokens, width), sharing.dtype)
            for name, width in zip(layer.names, layer.widths, strict=True)
        )
    )


def _layout(sharing: PrefixSharing, layers: Sequence[Layer]) -> str:
    numbers = ",".join(str(layer.global_layer) for layer in layers)
    return f"{SLICES_LAYOUT}; layers {numbers}; {sharing.layout}"
