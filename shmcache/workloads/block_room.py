"""How many blocks of one size fit into an arena, and how large an arena for so many must be.

Why: an arena is cut into slabs, and no block crosses the edge of one. Where a slab is no multiple
of the block, the rest of each is lost: up to half of the arena.
Source: docs/arena.md, "Sizes"; core/slabs.c.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from shmcache import bounds

# A block, and the end of an arena, is on one of these.
LINE_BYTES: Final = 64
_PAGE_BYTES: Final = 4096
_SLAB_BYTES: Final = 2 << 20


class BlockRoom(NamedTuple):
    """Blocks of `block_bytes` in a pool whose largest block is `block_bytes_max`, or this one."""

    block_bytes: int
    block_bytes_max: int = 0

    @property
    def place_bytes(self) -> int:
        """What a block takes in the arena."""
        unit = _PAGE_BYTES if self.block_bytes >= _PAGE_BYTES else LINE_BYTES
        return -(-self.block_bytes // unit) * unit

    @property
    def slab_bytes(self) -> int:
        """A piece of the arena, which has blocks of one size."""
        largest = max(self.block_bytes, self.block_bytes_max)
        return max(_SLAB_BYTES, -(-largest // _PAGE_BYTES) * _PAGE_BYTES)

    def without_waste(self) -> BlockRoom:
        """The same blocks in a pool whose slabs they fill, by a larger `block_bytes_max`."""
        places = -(-_SLAB_BYTES // self.place_bytes)
        return self._replace(block_bytes_max=places * self.place_bytes)

    def blocks(self, arena_bytes: int) -> int:
        """How many blocks an arena of this size holds."""
        slabs, rest = divmod(arena_bytes, self.slab_bytes)
        return slabs * (self.slab_bytes // self.place_bytes) + rest // self.place_bytes

    def arena_bytes(self, blocks: int) -> int:
        """The smallest arena that holds so many."""
        slabs, rest = divmod(blocks, self.slab_bytes // self.place_bytes)
        return max(slabs * self.slab_bytes + rest * self.place_bytes, bounds.ARENA_BYTES_MIN)
