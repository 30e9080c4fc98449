"""Values that the tests of this folder share: strategies for every type, and two manifests.

`hybrid()` has one layer of each kind a rule speaks of: rank 1 of 2 stages owns layers 5 to 9 of 10
and stored a prefix of six tokens; layer 6 slides over 3 tokens, layer 8 keeps keys, a convolution
and a pooled stream, layer 9 only fixed state, one token behind. `minimal()` has one layer.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from hypothesis import strategies as st

from shmcache.bounds import I32_MAX, I32_MIN, I64_MAX, I64_MIN, U32_MAX, U64_MAX
from shmcache.policy.attention import AnyAttentionPolicy, AttentionPolicy, LayerSchedule
from shmcache.policy.fingerprints import (
    derive_prompt_cache_architecture_fingerprint,
    prompt_cache_token_fingerprint,
)
from shmcache.policy.identity import CacheBlockId, CacheRankIdentity, CacheRepresentation
from shmcache.policy.layer import AnyLayerCachePolicy, LayerCachePolicy
from shmcache.policy.manifest import PromptCacheBlock, PromptCacheManifest, PromptCacheStateTensor
from shmcache.policy.prompt_identity import PromptCacheDescriptor
from shmcache.policy.state import (
    AnyStateComponentRole,
    AnyStateTensorOwner,
    StateComponentPolicy,
    StateComponentRole,
    StateTensorOwner,
    StateTensorPolicy,
)
from shmcache.policy.state_kinds import (
    AnyStateTensorDimension,
    AnyStateTensorPresence,
    AnyStateTensorRole,
    MutableStateResidency,
    PoolingStateComponent,
    StateResidencyClass,
    StateTensorDimension,
    StateTensorDtype,
    StateTensorPresence,
    StateTensorRole,
)
from shmcache.policy.topology import LayerRange, PromptCacheStateSegment, PromptCacheTopology

# Strategies: every value that the domains allow ---------------------------------------------------


def between(low: int, high: int) -> st.SearchStrategy[int]:
    return st.sampled_from((low, high)) | st.integers(low, high)


u32s, u64s, nz32s = between(0, U32_MAX), between(0, U64_MAX), between(1, U32_MAX)
i32s, i64s = between(I32_MIN, I32_MAX), between(I64_MIN, I64_MAX)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ranks = st.builds(
    CacheRankIdentity,
    stage_rank=st.none() | u64s,
    shard_rank=st.none() | u64s,
    addressable_rank=st.none() | u64s,
)
representations = st.sampled_from(CacheRepresentation)
block_ids = st.builds(
    CacheBlockId,
    session_id=u64s,
    global_layer=u64s,
    representation=representations,
    start=i64s,
    end=i64s,
    rank=st.none() | ranks,
)
attentions: st.SearchStrategy[AnyAttentionPolicy] = st.just(AttentionPolicy.Full()) | st.builds(
    AttentionPolicy.Sliding, nz32s
)
roles: st.SearchStrategy[AnyStateTensorRole] = st.one_of(
    st.builds(StateTensorRole.Convolution, u32s),
    st.just(StateTensorRole.Recurrent()),
    st.just(StateTensorRole.PrefixEmbedding()),
    st.just(StateTensorRole.PositionDelta()),
    st.builds(StateTensorRole.Pooling, u32s, st.sampled_from(PoolingStateComponent)),
)
dimensions: st.SearchStrategy[AnyStateTensorDimension] = st.one_of(
    st.just(StateTensorDimension.Batch()),
    st.just(StateTensorDimension.PrefixTokens()),
    st.builds(StateTensorDimension.PrefixTokensDiv, nz32s),
    st.builds(StateTensorDimension.PrefixTokensRem, nz32s),
    st.builds(StateTensorDimension.Fixed, nz32s),
    st.just(StateTensorDimension.Scalar()),
)
presences: st.SearchStrategy[AnyStateTensorPresence] = st.one_of(
    st.just(StateTensorPresence.Required()),
    st.just(StateTensorPresence.Optional()),
    st.builds(StateTensorPresence.PrefixRemainderNonZero, nz32s),
    st.builds(StateTensorPresence.PrefixAtLeast, nz32s),
)
owners: st.SearchStrategy[AnyStateTensorOwner] = st.builds(StateTensorOwner.Layer, u64s)
component_roles: st.SearchStrategy[AnyStateComponentRole] = st.one_of(
    st.just(StateComponentRole.AttentionKeys()),
    st.just(StateComponentRole.AttentionValues()),
    st.just(StateComponentRole.CompressedLatent()),
    st.just(StateComponentRole.RotaryKeys()),
    st.builds(StateComponentRole.Fixed, roles),
)


def tuples_of(element: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(element, max_size=3).map(tuple)


tensor_policies = st.builds(
    StateTensorPolicy,
    role=roles,
    shape=tuples_of(dimensions),
    dtype=st.sampled_from(StateTensorDtype),
    residency=st.sampled_from(StateResidencyClass),
    presence=presences,
)
component_policies = st.builds(
    StateComponentPolicy,
    role=component_roles,
    shape=tuples_of(dimensions),
    dtype=st.sampled_from(StateTensorDtype),
    residency=st.sampled_from(StateResidencyClass),
    presence=presences,
)
layers: st.SearchStrategy[AnyLayerCachePolicy] = st.one_of(
    st.just(LayerCachePolicy.NoState()),
    st.builds(LayerCachePolicy.KeyValue, attentions, nz32s, nz32s),
    st.builds(LayerCachePolicy.KeyOnly, attentions, nz32s, nz32s),
    st.builds(LayerCachePolicy.CompressedLatentRotary, attentions, nz32s, nz32s),
    st.builds(LayerCachePolicy.FixedState, tuples_of(tensor_policies)),
    st.builds(
        LayerCachePolicy.KeyValueWithFixedState,
        attentions,
        nz32s,
        nz32s,
        tuples_of(tensor_policies),
    ),
    st.builds(
        LayerCachePolicy.KeyOnlyWithFixedState, attentions, nz32s, nz32s, tuples_of(tensor_policies)
    ),
)
schedules = st.lists(layers, max_size=3).map(LayerSchedule)
axes = st.none() | st.tuples(u64s, u64s)
topologies = st.builds(
    PromptCacheTopology,
    stage=axes,
    shard=axes,
    addressable=axes,
    addressable_state_replicated=st.booleans(),
)
ranges = st.builds(LayerRange, start=u64s, end=u64s)
segments = st.builds(PromptCacheStateSegment, id=texts, layers=ranges)
blocks = st.builds(
    PromptCacheBlock,
    global_layer=u64s,
    representation=representations,
    start=i64s,
    end=i64s,
    rank=st.none() | ranks,
    shard=texts,
    first_array=texts,
    second_array=texts,
    first_shape=tuples_of(i32s),
    second_shape=tuples_of(i32s),
    first_dtype=texts,
    second_dtype=texts,
    logical_bytes=u64s,
    payload_sha256=texts,
)
state_tensors = st.builds(
    PromptCacheStateTensor,
    owner=owners,
    role=roles,
    shard=texts,
    array=texts,
    shape=tuples_of(i32s),
    dtype=texts,
    logical_bytes=u64s,
    payload_sha256=texts,
)
manifests = st.builds(
    PromptCacheManifest,
    schema_version=u32s,
    model_family=texts,
    effective_model_type=texts,
    checkpoint_fingerprint=texts,
    prefix_content_fingerprint=texts,
    architecture_fingerprint=texts,
    layer_count=u64s,
    global_layer_start=u64s,
    global_layer_end=u64s,
    block_size_tokens=i32s,
    batch_size=u64s,
    total_prefix_tokens=u64s,
    prefix_sha256=texts,
    layer_layout=schedules,
    layer_prefix_offsets=tuples_of(i32s),
    state_segments=tuples_of(segments),
    sink_tokens=u64s,
    topology=topologies,
    application_namespace=st.none() | texts,
    blocks=tuples_of(blocks),
    state_tensors=tuples_of(state_tensors),
)

# Two manifests ------------------------------------------------------------------------------------

PREFIX = (3, 1, 4, 1, 5, 9)


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def hybrid_layers() -> LayerSchedule[AnyLayerCachePolicy]:
    batch, fixed = StateTensorDimension.Batch(), StateTensorDimension.fixed
    device = MutableStateResidency.ALWAYS_DEVICE_MUTABLE
    convolution = StateTensorPolicy.new(
        StateTensorRole.Convolution(0), (batch, fixed(5)), StateTensorDtype.FLOATING, device
    )
    pending = StateTensorPolicy.new(
        StateTensorRole.Pooling(0, PoolingStateComponent.PENDING_VALUES),
        (batch, StateTensorDimension.PrefixTokensRem(4), fixed(7)),
        StateTensorDtype.FLOATING,
        device,
    ).when_prefix_remainder_nonzero(4)
    pooled = StateTensorPolicy.new_with_residency(
        StateTensorRole.Pooling(0, PoolingStateComponent.POOLED),
        (batch, StateTensorDimension.PrefixTokensDiv(4), fixed(7)),
        StateTensorDtype.FLOATING,
        StateResidencyClass.SEALABLE_PAGED,
    ).when_prefix_at_least(4)
    recurrent = StateTensorPolicy.new(
        StateTensorRole.Recurrent(),
        (batch, fixed(2), fixed(3)),
        StateTensorDtype.FLOAT32,
        MutableStateResidency.LAYER_SCOPED_OFFLOADABLE,
    )
    delta = StateTensorPolicy.new(
        StateTensorRole.PositionDelta(),
        (StateTensorDimension.Scalar(),),
        StateTensorDtype.INT32,
        device,
    ).optional()
    full = AttentionPolicy.Full()
    layers = (
        LayerCachePolicy.key_value(full, 2, 8),
        LayerCachePolicy.key_value(AttentionPolicy.sliding(3), 2, 8),
        LayerCachePolicy.compressed_latent_rotary(full, 6, 4),
        LayerCachePolicy.key_only_with_fixed_state(full, 1, 8, (convolution, pending, pooled)),
        LayerCachePolicy.fixed_only((recurrent, delta)),
    )
    return LayerSchedule.new(5, layers)


def hybrid_blocks() -> tuple[PromptCacheBlock, ...]:
    latent = CacheRepresentation.COMPRESSED_LATENT_ROTARY
    keys = CacheRepresentation.KEY_VALUE
    heads: dict[str, tuple[int, ...]] = {"first": (1, 2), "second": (1, 2)}
    kinds: dict[int, tuple[CacheRepresentation, tuple[str, str], tuple[int, ...], tuple[int, int]]]
    kinds = {
        5: (keys, ("keys", "values"), heads["first"], (8, 8)),
        6: (keys, ("keys", "values"), heads["second"], (8, 8)),
        7: (latent, ("latent", "rotary_key"), (1,), (6, 4)),
        8: (keys, ("keys", "values"), (1, 1), (8, 1)),
    }
    places = ((5, 0, 4), (5, 4, 6), (6, 4, 6), (7, 0, 4), (7, 4, 6), (8, 0, 4), (8, 4, 6))
    made = []
    for number, (layer, start, end) in enumerate(places):
        representation, names, lead, widths = kinds[layer]
        shapes = [(*lead, end - start, width) for width in widths]
        made.append(
            PromptCacheBlock(
                global_layer=layer,
                representation=representation,
                start=start,
                end=end,
                rank=CacheRankIdentity(stage_rank=1),
                shard=f"block-{number:08d}.safetensors",
                first_array=names[0],
                second_array=names[1],
                first_shape=shapes[0],
                second_shape=shapes[1],
                first_dtype="Float16",
                second_dtype="Float16",
                logical_bytes=64 + number,
                payload_sha256=digest(f"block {number}"),
            )
        )
    return tuple(made)


def hybrid_tensors() -> tuple[PromptCacheStateTensor, ...]:
    pooling = StateTensorRole.Pooling
    entries: tuple[tuple[int, AnyStateTensorRole, tuple[int, ...], str], ...] = (
        (8, StateTensorRole.Convolution(0), (1, 5), "Float16"),
        (8, pooling(0, PoolingStateComponent.PENDING_VALUES), (1, 2, 7), "Float16"),
        (8, pooling(0, PoolingStateComponent.POOLED), (1, 1, 7), "Float16"),
        (9, StateTensorRole.Recurrent(), (1, 2, 3), "Float32"),
        (9, StateTensorRole.PositionDelta(), (1,), "Int32"),
    )
    return tuple(
        PromptCacheStateTensor(
            owner=StateTensorOwner.Layer(layer),
            role=role,
            shard=f"state-{number:08d}.safetensors",
            array="state",
            shape=shape,
            dtype=dtype,
            logical_bytes=4 + number,
            payload_sha256=digest(f"state {number}"),
        )
        for number, (layer, role, shape, dtype) in enumerate(entries)
    )


def hybrid() -> PromptCacheManifest:
    return PromptCacheManifest(
        schema_version=8,
        model_family="sample",
        effective_model_type="sample_hybrid",
        checkpoint_fingerprint="weights 1",
        prefix_content_fingerprint="grüße",
        architecture_fingerprint=derive_prompt_cache_architecture_fingerprint("sample", []),
        layer_count=10,
        global_layer_start=5,
        global_layer_end=10,
        block_size_tokens=4,
        batch_size=1,
        total_prefix_tokens=len(PREFIX),
        prefix_sha256=prompt_cache_token_fingerprint(PREFIX),
        layer_layout=hybrid_layers(),
        layer_prefix_offsets=(0, 0, 0, 0, -1),
        state_segments=(
            PromptCacheStateSegment.new("decoder", range(4)),
            PromptCacheStateSegment.new("draft", range(4, 5)),
        ),
        sink_tokens=0,
        topology=PromptCacheTopology.new((2, 1), None, None, True),
        application_namespace="tests",
        blocks=hybrid_blocks(),
        state_tensors=hybrid_tensors(),
    )


def minimal() -> PromptCacheManifest:
    """The smallest complete manifest of the contract (prompt_cache 9)."""
    return PromptCacheManifest(
        schema_version=8,
        model_family="demo",
        effective_model_type="demo",
        checkpoint_fingerprint="ckpt-1",
        prefix_content_fingerprint="text-1",
        architecture_fingerprint=derive_prompt_cache_architecture_fingerprint(
            "demo", [("layers", "1")]
        ),
        layer_count=1,
        global_layer_start=0,
        global_layer_end=1,
        block_size_tokens=4,
        batch_size=1,
        total_prefix_tokens=3,
        prefix_sha256=prompt_cache_token_fingerprint([5, 6, 7]),
        layer_layout=LayerSchedule.new(
            1, [LayerCachePolicy.key_value(AttentionPolicy.Full(), 1, 2)]
        ),
        layer_prefix_offsets=(0,),
        state_segments=(PromptCacheStateSegment.new("state", range(1)),),
        sink_tokens=0,
        topology=PromptCacheTopology.default(),
        blocks=(
            PromptCacheBlock(
                global_layer=0,
                representation=CacheRepresentation.KEY_VALUE,
                start=0,
                end=3,
                shard="block-00000000.safetensors",
                first_array="keys",
                second_array="values",
                first_shape=(1, 1, 3, 2),
                second_shape=(1, 1, 3, 2),
                first_dtype="Float32",
                second_dtype="Float32",
                logical_bytes=48,
                # keys 0 to 5, then values 6 to 11, as little-endian float32
                payload_sha256=hashlib.sha256(struct.pack("<12f", *range(12))).hexdigest(),
            ),
        ),
        state_tensors=(),
    )


def descriptor_of(manifest: PromptCacheManifest) -> PromptCacheDescriptor:
    """What a caller expects whose own this manifest is."""
    names = PromptCacheDescriptor.__struct_fields__
    return PromptCacheDescriptor(**{name: getattr(manifest, name) for name in names})
