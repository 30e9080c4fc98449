"""How a model's cache is split: over ranks (topology), and into named pieces of layers (segments).

Why: a rank stores only its own part. What it stored may be read back only by the same rank of an
equal split, and a piece of the layout may be loaded on its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self, TypeAlias

from shmcache.errors import PromptCacheError
from shmcache.policy.fields import Checked, Usize
from shmcache.policy.identity import CacheRankIdentity

TextError: TypeAlias = type[PromptCacheError.Malformed] | type[PromptCacheError.Incompatible]


class PromptCacheTopology(Checked, frozen=True, kw_only=True, gc=False):
    """World size and rank, as (size, rank), on each axis that is split; None for the others.

    Contract: a size of 1 is still an axis. The class call and a decoder do not validate.
    """

    stage: tuple[Usize, Usize] | None = None
    shard: tuple[Usize, Usize] | None = None
    addressable: tuple[Usize, Usize] | None = None
    addressable_state_replicated: bool

    @classmethod
    def new(
        cls,
        stage: tuple[int, int] | None,
        shard: tuple[int, int] | None,
        addressable: tuple[int, int] | None,
        addressable_state_replicated: bool,
    ) -> Self:
        made = cls(
            stage=stage,
            shard=shard,
            addressable=addressable,
            addressable_state_replicated=addressable_state_replicated,
        )
        made.validate()
        return made

    @classmethod
    def default(cls) -> Self:
        """One process holds everything."""
        return cls(addressable_state_replicated=True)

    def validate(self) -> None:
        """Check that each rank is one of its axis.

        Errors: `PromptCacheError.Malformed` `topology_stage`, `topology_shard`,
        `topology_addressable`.
        """
        for axis in ("stage", "shard", "addressable"):
            size, rank = getattr(self, axis) or (1, 0)
            if rank >= size:
                raise PromptCacheError.Malformed(f"topology_{axis}", f"rank {rank} of {size}")

    def cache_rank_identity(self) -> CacheRankIdentity | None:
        """The rank that blocks of this split carry; None without any axis."""
        if self.stage is None and self.shard is None and self.addressable is None:
            return None
        return CacheRankIdentity(
            stage_rank=self.stage and self.stage[1],
            shard_rank=self.shard and self.shard[1],
            addressable_rank=self.addressable and self.addressable[1],
        )


class LayerRange(Checked, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """Layers from `start` up to, without, `end`, counted within the owned layers."""

    start: Usize
    end: Usize

    def __len__(self) -> int:
        return self.len()

    def len(self) -> int:
        """How many layers; 0 when `end` does not lie after `start`."""
        return max(self.end - self.start, 0)


class PromptCacheStateSegment(Checked, frozen=True, kw_only=True, gc=False):
    """A named contiguous piece of the owned layers.

    Contract: `new` validates, the class call and a decoder do not.
    """

    id: str
    layers: LayerRange

    @classmethod
    def new(cls, id: str, layers: LayerRange | range) -> Self:
        if isinstance(layers, range):
            if layers.step != 1:
                raise ValueError(f"layers must have step 1, not {layers.step}")
            layers = LayerRange(start=layers.start, end=layers.stop)
        made = cls(id=id, layers=layers)
        if is_blank(made.id):
            raise PromptCacheError.Malformed("segment_id_empty")
        if made.layers.len() == 0:
            raise PromptCacheError.Malformed("segment_range_empty", f"{made.id!r} has no layer")
        return made


def is_blank(value: str) -> bool:
    """True for a text without anything but white space."""
    return not value.strip()


def validate_segments(
    segments: Iterable[PromptCacheStateSegment], owned: int, error: TextError
) -> None:
    """Check that the segments cover `owned` layers in order, without gap, each under its own name.

    Errors: `error` with `segments_missing`, `segment_id_empty`, `segment_id_duplicate`,
    `segments_not_partition`, `segments_incomplete`.
    """
    seen: set[str] = set()
    end = 0
    for segment in segments:
        layers = segment.layers
        if is_blank(segment.id):
            raise error("segment_id_empty")
        if segment.id in seen:
            raise error("segment_id_duplicate", repr(segment.id))
        if layers.start != end or layers.end <= layers.start or layers.end > owned:
            raise error(
                "segments_not_partition",
                f"{segment.id!r} has layers {layers.start} to {layers.end}, expected from {end}",
            )
        seen.add(segment.id)
        end = layers.end
    if not seen:
        raise error("segments_missing")
    if end != owned:
        raise error("segments_incomplete", f"{end} of {owned} layers have a segment")
