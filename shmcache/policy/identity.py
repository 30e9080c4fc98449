"""Who a block belongs to: its session, layer, representation, token range and rank.

Why: one name for one immutable block, the same in every process, usable as a key and in sorted
order, so that two workers that list the same blocks list them alike.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Self

from shmcache.policy.fields import I64, U64, Checked, Usize
from shmcache.policy.payload import Ordered, OrderedEnum, order_key


class CacheRepresentation(OrderedEnum):
    """Which pair of arrays a block stores."""

    KEY_VALUE = "key_value"  # also for layers that keep keys only
    COMPRESSED_LATENT_ROTARY = "compressed_latent_rotary"


class CacheTier(Enum):
    """Where a sealed block currently is."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class CacheRankIdentity(Ordered, Checked, frozen=True, kw_only=True, gc=False):
    """The rank that owns a block of a distributed model, on each axis that is split.

    Contract: "no rank" is None in the holder, not an identity of three None.
    """

    stage_rank: Usize | None = None
    shard_rank: Usize | None = None
    addressable_rank: Usize | None = None

    @classmethod
    def new(
        cls,
        stage_rank: int | None = None,
        shard_rank: int | None = None,
        addressable_rank: int | None = None,
    ) -> Self:
        return cls(stage_rank=stage_rank, shard_rank=shard_rank, addressable_rank=addressable_rank)

    def sort_key(self) -> tuple[Any, ...]:
        """Axis by axis, an absent one first."""
        ranks = (self.stage_rank, self.shard_rank, self.addressable_rank)
        return tuple(map(order_key, ranks))


class CacheBlockId(Ordered, Checked, frozen=True, kw_only=True, gc=False, cache_hash=True):
    """The stable identity of one sealed block. Sessions of one cache share `session_id`.

    Units: `start` (inclusive) and `end` (exclusive) are absolute token positions; `global_layer`
    counts in the whole model, not in this rank's part.

    Contract: only domains are checked here; `start < end` is the business of who makes the block.
    """

    session_id: U64
    global_layer: Usize
    representation: CacheRepresentation
    start: I64
    end: I64
    rank: CacheRankIdentity | None = None

    def sort_key(self) -> tuple[Any, ...]:
        """Field by field, no rank first: the identity order of the contract."""
        return (
            self.session_id,
            self.global_layer,
            self.representation.position,
            self.start,
            self.end,
            order_key(self.rank),
        )
