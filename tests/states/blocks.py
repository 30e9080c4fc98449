"""Block identities for tests of the state machines, and their order written out a second time."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from shmcache.policy.identity import CacheBlockId, CacheRankIdentity, CacheRepresentation

KEY_VALUE = CacheRepresentation.KEY_VALUE
LATENT = CacheRepresentation.COMPRESSED_LATENT_ROTARY


def block(
    layer: int,
    start: int,
    end: int,
    *,
    session: int = 9,
    representation: CacheRepresentation = KEY_VALUE,
    rank: CacheRankIdentity | None = None,
) -> CacheBlockId:
    """The block that the examples write as layer[start,end)."""
    return CacheBlockId(
        session_id=session,
        global_layer=layer,
        representation=representation,
        start=start,
        end=end,
        rank=rank,
    )


def rank(*parts: int | None) -> CacheRankIdentity:
    stage, shard, addressable = parts
    return CacheRankIdentity(stage_rank=stage, shard_rank=shard, addressable_rank=addressable)


def identity_order(id: CacheBlockId) -> tuple[Any, ...]:
    """A key with the order that the contract asks of identities; -1 stands for None."""
    where = id.rank
    parts = (where.stage_rank, where.shard_rank, where.addressable_rank) if where else ()
    representation = [KEY_VALUE, LATENT].index(id.representation)
    ranks = tuple(-1 if part is None else part for part in parts)
    return (id.session_id, id.global_layer, representation, id.start, id.end, ranks)


# So few that most calls of a random sequence meet a block that an earlier call left behind.
ids = st.builds(
    block,
    st.integers(0, 1),
    st.sampled_from([0, 4, 8]),
    st.sampled_from([12, 16]),
    session=st.integers(8, 9),
    representation=st.sampled_from([KEY_VALUE, LATENT]),
    rank=st.sampled_from([None, rank(None, None, None), rank(0, None, 3)]),
)
