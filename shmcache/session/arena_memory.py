"""Host copies in the pool's arena: one block for the layers of a group and one range of tokens.

Why: a block per layer would be a key per layer once blocks are shared, and a size per layer in the
arena. Layers of equal policy have slices of equal size, so they lie side by side in one block,
which is there as long as one of them is.

Contract: allocating is the admission, and the engine charges the block: a session publishes nothing
for it, but counts its capacity against its own host budget, once. A slice is given out again only
when no array of its former copy is alive, so nothing that is still read is written over.

Concurrency: the session's lock guards it. Death: blocks of a killed process are freed by reclaim.

Not here: publishing, matching (sharing.py).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from shmcache._core import Block
from shmcache.errors import CachePoolError, ContractError, SegmentError
from shmcache.policy.identity import CacheBlockId
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolResource
from shmcache.session.backend import BlockSpec, HostAllocation, HostCopy
from shmcache.session.slices import (
    Bytes,
    class_bytes,
    layer_groups,
    slice_arrays,
    slices_per_block,
    stride,
)

_Key: TypeAlias = tuple[int, int, int, int, int]


class _Place(NamedTuple):
    """A layer's place among those that share blocks."""

    group: int
    number: int
    layers: int


class _GroupBlock(HostAllocation):
    """One block of the arena, and which of its slices are in use."""

    __slots__ = ("_block", "_used")

    def __init__(self, block: Block) -> None:
        super().__init__(block.capacity, 0)
        self._block = block
        self._used: dict[int, weakref.ref[Bytes]] = {}

    def has_free(self, index: int) -> bool:
        """Whether no array of an earlier copy in this slice is alive."""
        used = self._used.get(index)
        return used is None or used() is None

    def slice(self, index: int, nbytes: int) -> Bytes:
        """The bytes of a slice; all arrays over them keep this very array, and the block, alive."""
        made: Bytes = np.frombuffer(
            self._block.memoryview(), np.uint8, count=nbytes, offset=index * nbytes
        )
        self._used[index] = weakref.ref(made)
        return made


class ArenaHostMemory:
    """See the module. `groups` says which layers share a block: `for_model` takes those of equal
    policy, one list per layer gives each its own block.

    Errors: `SegmentError.NoArena` when it is used with a pool that has none.
    """

    def __init__(self, pool: CacheResidencyPool, groups: Iterable[Sequence[int]]) -> None:
        self._pool = pool
        self._places = {
            layer: _Place(layers[0], index, len(layers))
            for layers in groups
            for index, layer in enumerate(layers)
        }
        self._block_bytes_max = pool.geometry().block_bytes_max
        self._blocks: weakref.WeakValueDictionary[_Key, _GroupBlock] = weakref.WeakValueDictionary()

    @classmethod
    def for_model(cls, pool: CacheResidencyPool, model: PromptCacheModelIdentity) -> Self:
        """Layers of equal policy share blocks."""
        return cls(pool, layer_groups(model))

    @property
    def admits(self) -> bool:
        """The arena charges each block by itself."""
        return True

    @property
    def pool_evicts(self) -> bool:
        """Published blocks that nobody leases make room for new ones."""
        return True

    def bound(self, id: CacheBlockId, spec: BlockSpec) -> int:
        """The capacity of a new block, or nothing where a slice of an old one is free."""
        key, index, slices = self._find(id, spec)
        block = self._blocks.get(key)
        if block is not None and block.has_free(index):
            return 0
        return class_bytes(slices * stride(spec))

    def transfer_bytes(self, spec: BlockSpec) -> int:
        """A slice moves."""
        return spec.logical_bytes

    def allocate(self, id: CacheBlockId, spec: BlockSpec) -> HostCopy:
        """A slice of the group's block, which is made if it is not there.

        Errors: `CachePoolError.BudgetExceeded` of the host axis, also for a full arena;
        `SegmentError.BlockTooLarge`, `TableFull`.
        """
        key, index, slices = self._find(id, spec)
        block = self._blocks.get(key)
        if block is None or not block.has_free(index):
            block = _GroupBlock(self._new_block(slices * stride(spec)))
            self._blocks[key] = block
        room = block.slice(index, stride(spec))
        return HostCopy(slice_arrays(room, 0, spec), block, spec.logical_bytes)

    def _find(self, id: CacheBlockId, spec: BlockSpec) -> tuple[_Key, int, int]:
        """Which block the slice is in, its index there, and how many slices that block has.

        A group that is too large for one block of the arena has several.
        """
        place = self._places.get(id.global_layer, _Place(id.global_layer, 0, 1))
        fit = slices_per_block(spec, self._block_bytes_max)
        part, index = divmod(place.number, fit)
        slices = min(place.layers - part * fit, fit)
        return (place.group, part, id.start, id.end, stride(spec)), index, slices

    def _new_block(self, nbytes: int) -> Block:
        try:
            return self._pool.allocate(nbytes)
        except (SegmentError.ArenaFull, CachePoolError) as error:
            # An error that some frame below keeps in a variable would keep our frames, and with
            # them the memory of blocks, until the garbage collector comes by.
            error.__traceback__ = None
            raise self._refusal(error) from None

    def _refusal(self, error: ContractError) -> CachePoolError:
        """A full arena is a full host axis to a session: it can make room by itself."""
        if isinstance(error, CachePoolError):
            return copy.copy(error)
        arena, needed = self._pool.geometry().arena_bytes, getattr(error, "needed", 0)
        return CachePoolError.BudgetExceeded(CachePoolResource.HOST, arena + needed, arena)
