"""Keys and values of one sequence in blocks that the caller hands in, for the decoder to read.

    store = BlockStore(shape, 32, prefix_tokens=320, prefix=leased)   # per group: its arrays
    logits = decoder.prefill(tokens[320:], store)
    store.blocks(group)                                               # the new ones among them

Why         Layers that see equally far form a group. One block holds all layers of a group for one
            range of tokens, so that a prefix is one key per range and group, not one per layer.
Contract    A block covers `block_tokens` tokens from a multiple of `block_tokens`. Handed-in blocks
            are only read. New ones come from `allocate`, are written in place, and when the last
            token of the last layer is in they go through `seal`, whose answer is read from then on:
            there a worker publishes a block and answers with the shared, read-only array.
            A group with a window keeps only the blocks that the next token can see, those with
            sinks included, and needs no more of a prefix; `prefix_tokens` says where they end.
Shapes      Whatever order of axes the layout has; elements of a head always lie side by side,
            because matrix kernels read rows.
Not here    Leases, keys and budgets: the caller keeps its leases as long as it uses the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shmcache.workloads.decoder import DecoderShape, Floats, Piece

_AXES = ("layer", "kv", "head", "token", "dim")


class BlockLayout(msgspec.Struct, frozen=True):
    """The order of a block's axes, outermost first; `kv` is 0 for keys, 1 for values."""

    axes: tuple[str, ...] = _AXES

    def __post_init__(self) -> None:
        if sorted(self.axes) != sorted(_AXES) or self.axes[-1] != "dim":
            raise ValueError(f"axes are {_AXES} in any order with dim last, not {self.axes}")

    def shape(self, model: DecoderShape, layers: int, tokens: int) -> tuple[int, ...]:
        """Of a block of that many layers and tokens."""
        sizes = dict(zip(_AXES, (layers, 2, model.kv_heads, tokens, model.head_dim), strict=True))
        return tuple(sizes[axis] for axis in self.axes)

    def ordered(self, block: Floats) -> Floats:
        """A view [layer, kv, head, token, dim]."""
        return block.transpose([self.axes.index(axis) for axis in _AXES])


class LayerGroup(NamedTuple):
    """Layers that share blocks because they see equally far."""

    window: int | None
    layers: tuple[int, ...]


def layer_groups(shape: DecoderShape) -> tuple[LayerGroup, ...]:
    """The groups in the order of their first layers."""
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(shape.windows):
        layers.setdefault(window, []).append(layer)
    return tuple(LayerGroup(window, tuple(members)) for window, members in layers.items())


class KVBlock(NamedTuple):
    """A block as it was handed in, allocated or sealed, and the position of its first token."""

    start: int
    array: Floats
    ordered: Floats


Allocate = Callable[[int, int, tuple[int, ...]], Floats]
Seal = Callable[[int, int, Floats], Floats]


def private_block(group: int, start: int, shape: tuple[int, ...]) -> Floats:
    """A block in this process's memory."""
    return np.empty(shape, np.float32)


def frozen_block(group: int, start: int, block: Floats) -> Floats:
    """The block itself, never to be written again."""
    block.flags.writeable = False
    return block


class BlockStore:
    """A `KeyValueStore` of blocks; every list in it has one entry per group.

    `allocate(group, start, shape)` gives a writable fp32 array, `seal(group, start, block)` answers
    what to read instead. `prefix`: per group, the blocks that end at `prefix_tokens`, oldest first.

    `seal` must not fail: a block that cannot be shared is answered with itself.

    Death       A step that raises in the middle leaves the store as before the step.
    """

    def __init__(
        self,
        shape: DecoderShape,
        block_tokens: int,
        *,
        layout: BlockLayout = BlockLayout(),  # noqa: B008 (immutable)
        prefix_tokens: int = 0,
        prefix: Sequence[Sequence[Floats]] = (),
        allocate: Allocate = private_block,
        seal: Seal = frozen_block,
    ) -> None:
        self.shape = shape
        self.block_tokens = block_tokens
        self.layout = layout
        self.groups = layer_groups(shape)
        self._tokens = prefix_tokens
        self._allocate = allocate
        self._seal = seal
        self._places = {
            layer: (group, row)
            for group, (_, layers) in enumerate(self.groups)
            for row, layer in enumerate(layers)
        }
        self._blocks = [self._adopted(group, prefix) for group in range(len(self.groups))]

    @property
    def tokens(self) -> int:
        """How many tokens the sequence has, kept or not."""
        return self._tokens

    def block_shape(self, group: int) -> tuple[int, ...]:
        """Of every array of this group."""
        return self.layout.shape(self.shape, len(self.groups[group].layers), self.block_tokens)

    def blocks(self, group: int) -> tuple[KVBlock, ...]:
        """What is kept, oldest first; the last is the mutable tail if it ends after `tokens`."""
        return tuple(self._blocks[group])

    def extend(self, layer: int, keys: Floats, values: Floats) -> Sequence[Piece]:
        """Write a step's keys and values behind the `tokens` of this layer; what the layer sees."""
        group, row = self._places[layer]
        blocks, start, end = self._blocks[group], self._tokens, self._tokens + keys.shape[1]
        while (free := self._end(group)) < end:
            array = self._allocate(group, free, self.block_shape(group))
            blocks.append(self._block(group, free, array))
        pieces = [Piece(at, *array[row, :, :, : end - at]) for at, _, array in blocks]
        for at, *written in pieces:
            if at + self.block_tokens > start:
                old, new = max(start - at, 0), max(at - start, 0)
                for kept, fresh in zip(written, (keys, values), strict=True):
                    kept[:, old:] = fresh[:, new : new + kept.shape[1] - old]
        return pieces

    def advance(self, tokens: int) -> None:
        """Seal the blocks that are full now; forget those that no window reaches any more."""
        before, self._tokens = self._tokens, self._tokens + tokens
        for group, blocks in enumerate(self._blocks):
            for index, (start, array, _) in enumerate(blocks):
                if before < start + self.block_tokens <= self._tokens:
                    blocks[index] = self._block(group, start, self._seal(group, start, array))
            seen = visible_start(self._tokens, self.groups[group].window)
            blocks[:] = self._visible(blocks, seen)

    def _adopted(self, group: int, prefix: Sequence[Sequence[Floats]]) -> list[KVBlock]:
        size, window = self.block_tokens, self.groups[group].window
        end, seen = self._tokens // size, visible_start(self._tokens, window)
        sinks = min(-(-self.shape.sinks // size), end)
        arrays = prefix[group] if prefix else ()
        first = end - (len(arrays) - sinks)  # of those behind the sinks
        if self._tokens % size or not sinks <= first <= max(seen // size, sinks):
            raise ValueError(
                f"group {group}: {len(arrays)} blocks of {size} cannot be the end of a prefix of"
                f" {self._tokens} tokens with window {window} and {self.shape.sinks} sinks"
            )
        places = (*range(sinks), *range(first, end))
        blocks = [self._block(group, n * size, a) for n, a in zip(places, arrays, strict=True)]
        return self._visible(blocks, seen)

    def _visible(self, blocks: list[KVBlock], seen: int) -> list[KVBlock]:
        """Those with a sink, and those that reach beyond position `seen`."""
        size, sinks = self.block_tokens, self.shape.sinks
        return [block for block in blocks if block.start < sinks or block.start + size > seen]

    def _block(self, group: int, start: int, array: Floats) -> KVBlock:
        want = self.block_shape(group)
        if array.shape != want or array.dtype != np.float32:
            raise ValueError(
                f"a block of group {group} is float32 {want}, not {array.dtype} {array.shape}"
            )
        return KVBlock(start, array, self.layout.ordered(array))

    def _end(self, group: int) -> int:
        blocks = self._blocks[group]
        return blocks[-1].start + self.block_tokens if blocks else self._tokens


def visible_start(tokens: int, window: int | None) -> int:
    """The first position that the token after `tokens` others can see."""
    return 0 if window is None else max(tokens - window + 1, 0)
