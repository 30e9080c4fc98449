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


class NamedBlocks:
    """Blocks that sessions find under the names of their tokens; a model has several such rows.

    `keys` are those of the prefix as far as its tokens are known. `live`: the leased blocks by
    their place in the prefix, as long as an array of one is alive.
    """

    __slots__ = ("_names", "keys", "live", "number")

    def __init__(self, number: int, names: PrefixKeys) -> None:
        self.number = number
        self.keys: list[bytes] = []
        self.live: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        self._names = names

    @property
    def sees_all(self) -> bool:
        """Whether a prefix is of use only with all of its blocks."""
        raise NotImplementedError

    def bytes_of(self, index: int) -> int:
        """Bytes of the block at this place of the prefix."""
        raise NotImplementedError

    def needed(self, first: int, blocks: int, prefix_tokens: int) -> Sequence[int]:
        """Which of the blocks from `first` up to `blocks` the token after them needs."""
        raise NotImplementedError

    @property
    def leased_bytes(self) -> int:
        """What the live blocks occupy."""
        return sum(class_bytes(self.bytes_of(index)) for index in tuple(self.live))

    def chain(self, tokens: TokenIds) -> list[bytes]:
        """The keys of all full blocks of `tokens`, which continue the known prefix."""
        known, size = len(self.keys), self._names.block_tokens
        if len(tokens) // size <= known:
            return self.keys
        parent = self.keys[-1] if known else None
        made = self._names.chain(tokens[known * size :], parent).tobytes()
        return self.keys + [made[at : at + KEY_BYTES] for at in range(0, len(made), KEY_BYTES)]


class SharedGroup(NamedBlocks):
    """Layers whose slices lie in one block."""

    __slots__ = ("layers", "nbytes", "spec", "stride", "window")

    def __init__(
        self, number: int, names: PrefixKeys, layers: Sequence[Layer], spec: BlockSpec
    ) -> None:
        super().__init__(number, names)
        self.layers = tuple(layers)
        self.window = layers[0].window
        self.spec = spec
        self.stride = stride(spec)
        self.nbytes = len(layers) * self.stride

    @property
    def sees_all(self) -> bool:
        """Whether its layers have no window."""
        return self.window is None

    @property
    def leased_bytes(self) -> int:
        """What the live blocks occupy."""
        return len(self.live) * class_bytes(self.nbytes)

    def bytes_of(self, index: int) -> int:
        """The same for each."""
        return self.nbytes

    def needed(self, first: int, blocks: int, prefix_tokens: int) -> Sequence[int]:
        """What the window holds, and the protected prefix."""
        if self.window is None:
            return range(first, blocks)
        size = self._names.block_tokens
        end = blocks * size
        sinks = -(-min(prefix_tokens, end) // size)
        seen = max(end - self.window, 0) // size
        return [index for index in range(first, blocks) if index < sinks or index >= seen]


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
            numbers_text = ",".join(str(layer.global_layer) for layer in members)
            layout = f"{SLICES_LAYOUT}; layers {numbers_text}"
            names = prefix_keys(model, sharing, block_tokens, len(groups), layout)
            groups.append(SharedGroup(len(groups), names, members, spec))
    return groups


def prefix_keys(
    model: PromptCacheModelIdentity,
    sharing: PrefixSharing,
    block_tokens: int,
    group: int,
    layout: str,
) -> PrefixKeys:
    """The names of one row of blocks. Errors: TypeError, ValueError."""
    return PrefixKeys(
        model,
        checkpoint_fingerprint=sharing.checkpoint_fingerprint,
        dtype=sharing.dtype.name,
        layout=f"{layout}; {sharing.layout}",
        block_tokens=block_tokens,
        salt=sharing.salt,
        group=group,
        rank=model.topology.cache_rank_identity(),
    )


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
