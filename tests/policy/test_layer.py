"""Layer policies: constructors, validation, components, the arrays of a block (policy 7)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given

from shmcache.bounds import I32_MAX, I32_MIN, U32_MAX
from shmcache.errors import CachePolicyError
from shmcache.policy.attention import AttentionPolicy
from shmcache.policy.block_arrays import block_arrays
from shmcache.policy.identity import CacheRepresentation
from shmcache.policy.layer import LayerCachePolicy
from shmcache.policy.state import StateComponentPolicy, StateComponentRole, StateTensorPolicy
from shmcache.policy.state_kinds import (
    MutableStateResidency,
    StateResidencyClass,
    StateTensorDimension,
    StateTensorDtype,
    StateTensorPresence,
    StateTensorRole,
)
from shmcache.policy.wire import from_wire, to_wire
from tests.policy.samples import layers

FULL = AttentionPolicy.Full()
BATCH, TOKENS = StateTensorDimension.Batch(), StateTensorDimension.PrefixTokens()
RECURRENT = StateTensorPolicy.new(
    StateTensorRole.Recurrent(),
    (BATCH, StateTensorDimension.fixed(3)),
    StateTensorDtype.FLOAT32,
    MutableStateResidency.LAYER_SCOPED_OFFLOADABLE,
).optional()
DELTA = StateTensorPolicy.new(
    StateTensorRole.PositionDelta(),
    (StateTensorDimension.Scalar(),),
    StateTensorDtype.INT32,
    MutableStateResidency.ALWAYS_DEVICE_MUTABLE,
)
MAKERS: dict[Any, Any] = {
    LayerCachePolicy.key_value: LayerCachePolicy.KeyValue,
    LayerCachePolicy.key_only: LayerCachePolicy.KeyOnly,
    LayerCachePolicy.compressed_latent_rotary: LayerCachePolicy.CompressedLatentRotary,
    LayerCachePolicy.key_value_with_fixed_state: LayerCachePolicy.KeyValueWithFixedState,
    LayerCachePolicy.key_only_with_fixed_state: LayerCachePolicy.KeyOnlyWithFixedState,
}


def tail(variant: Any) -> tuple[Any, ...]:
    """The arguments after the two sizes."""
    return ((RECURRENT,),) if "tensors" in variant.__struct_fields__ else ()


def code_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(CachePolicyError) as caught:
        call(*arguments)
    assert isinstance(caught.value, CachePolicyError.Invalid)
    return caught.value.code


def test_constructors() -> None:
    """policy 7"""
    for make, variant in MAKERS.items():
        made = make(FULL, 4, 64, *tail(variant))
        assert type(made) is variant
        assert made == variant(FULL, 4, 64, *tail(variant))
        assert made.dimensions == (4, 64)
        for sizes in itertools.product((0, -1, I32_MIN, 1, I32_MAX), repeat=2):
            if min(sizes) > 0:
                make(FULL, *sizes, *tail(variant))
            else:
                assert code_of(make, FULL, *sizes, *tail(variant)) == "not_positive"
        for outside in (I32_MAX + 1, I32_MIN - 1):
            for sizes in ((outside, 1), (1, outside)):
                with pytest.raises(ValueError, match="must be between"):
                    make(FULL, *sizes, *tail(variant))
        with pytest.raises(TypeError):
            make(FULL, True, 1, *tail(variant))
    assert LayerCachePolicy.fixed_only([RECURRENT]) == LayerCachePolicy.FixedState((RECURRENT,))


def test_the_examples() -> None:
    """policy 7.2"""
    assert code_of(LayerCachePolicy.key_value, FULL, 0, 64) == "not_positive"
    wide = AttentionPolicy.Sliding(1 << 31)
    assert code_of(LayerCachePolicy.key_value, wide, 4, 64) == "attention_window_range"
    assert code_of(LayerCachePolicy.fixed_only, ()) == "no_state_tensors"
    both = LayerCachePolicy.key_only_with_fixed_state(FULL, 2, 8, (RECURRENT,))
    names = [part.role.stable_name() for part in both.components()]
    assert names == ["attention.keys", "state.recurrent"]
    plain = {"key_only": {"attention": "full", "num_key_heads": 6, "head_dim": 48}}
    assert to_wire(LayerCachePolicy.KeyOnly(FULL, 6, 48)) == plain
    assert from_wire(LayerCachePolicy, plain) == LayerCachePolicy.KeyOnly(FULL, 6, 48)


def test_validate_in_order() -> None:
    """policy 7.1"""
    wide, large = AttentionPolicy.Sliding(I32_MAX + 1), I32_MAX + 1
    bad_tensor = StateTensorPolicy(
        role=StateTensorRole.Recurrent(),
        shape=(),
        dtype=StateTensorDtype.FLOAT32,
        residency=StateResidencyClass.SEALABLE_PAGED,
        presence=StateTensorPresence.Required(),
    )
    for variant in MAKERS.values():
        with_tensors = bool(tail(variant))
        worst: Any = ((bad_tensor,),) if with_tensors else ()
        none: Any = ((),) if with_tensors else ()
        assert code_of(variant(wide, large, large, *none).validate) == "attention_window_range"
        assert code_of(variant(FULL, large, 1, *none).validate) == "dimension_range"
        assert code_of(variant(FULL, 1, U32_MAX, *none).validate) == "dimension_range"
        if with_tensors:
            assert code_of(variant(FULL, 1, 1, ()).validate) == "no_state_tensors"
            assert code_of(variant(FULL, 1, 1, *worst).validate) == "invalid_shape"
        variant(AttentionPolicy.Sliding(I32_MAX), I32_MAX, 1, *tail(variant)).validate()
    fixed = LayerCachePolicy.FixedState
    assert code_of(fixed(()).validate) == "no_state_tensors"
    assert code_of(fixed((RECURRENT, RECURRENT)).validate) == "duplicate_role"
    assert code_of(fixed((bad_tensor,)).validate) == "invalid_shape"
    LayerCachePolicy.NoState().validate()


def test_components_of_each_variant() -> None:
    """policy 7.2"""
    fixed = StateTensorDimension.Fixed
    heads = (BATCH, fixed(2), TOKENS, fixed(8))
    attention = {
        LayerCachePolicy.KeyValue: [("attention.keys", heads), ("attention.values", heads)],
        LayerCachePolicy.KeyOnly: [("attention.keys", heads)],
        LayerCachePolicy.CompressedLatentRotary: [
            ("attention.compressed_latent", (BATCH, TOKENS, fixed(2))),
            ("attention.rotary_keys", (BATCH, TOKENS, fixed(8))),
        ],
    }
    attention[LayerCachePolicy.KeyValueWithFixedState] = attention[LayerCachePolicy.KeyValue]
    attention[LayerCachePolicy.KeyOnlyWithFixedState] = attention[LayerCachePolicy.KeyOnly]
    for variant, parts in attention.items():
        tensors: Any = ((RECURRENT, DELTA),) if "tensors" in variant.__struct_fields__ else ()
        layer = variant(FULL, 2, 8, *tensors)
        found = layer.components()
        count = len(found) - len(layer.fixed_state())
        assert [(part.role.stable_name(), part.shape) for part in found[:count]] == parts
        for part in found[:count]:
            assert part.dtype is StateTensorDtype.FLOATING
            assert part.residency is StateResidencyClass.SEALABLE_PAGED
            assert part.presence == StateTensorPresence.Required()
        assert [part.role for part in found[count:]] == [
            StateComponentRole.Fixed(tensor.role) for tensor in layer.fixed_state()
        ]
    assert LayerCachePolicy.NoState().components() == ()


@given(layers)
def test_every_layer_lists_attention_then_its_tensors(layer: Any) -> None:
    """policy 7 and 7.2"""
    parts = layer.components()
    tensors = layer.fixed_state()
    assert [part for part in parts if isinstance(part.role, StateComponentRole.Fixed)] == [
        StateComponentPolicy(
            role=StateComponentRole.Fixed(tensor.role),
            shape=tensor.shape,
            dtype=tensor.dtype,
            residency=tensor.residency,
            presence=tensor.presence,
        )
        for tensor in tensors
    ]
    without = isinstance(layer, LayerCachePolicy.NoState | LayerCachePolicy.FixedState)
    assert (layer.attention is None) is without
    paged = None if without else StateResidencyClass.SEALABLE_PAGED
    assert layer.attention_residency_class() is paged
    assert (len(parts) > len(tensors)) is not without
    assert tensors == getattr(layer, "tensors", ())


def test_block_arrays() -> None:
    """prompt_cache 6.2: names, shapes and representation of what a block stores."""
    batch, tokens = 5, 7
    tensors = (RECURRENT,)
    expected = {
        LayerCachePolicy.KeyValue(FULL, 2, 8): ("keys values", (5, 2, 7, 8), (5, 2, 7, 8)),
        LayerCachePolicy.KeyValueWithFixedState(FULL, 2, 8, tensors): (
            "keys values",
            (5, 2, 7, 8),
            (5, 2, 7, 8),
        ),
        LayerCachePolicy.KeyOnly(FULL, 2, 8): ("keys values", (5, 2, 7, 8), (5, 2, 7, 1)),
        LayerCachePolicy.KeyOnlyWithFixedState(FULL, 2, 8, tensors): (
            "keys values",
            (5, 2, 7, 8),
            (5, 2, 7, 1),
        ),
        LayerCachePolicy.CompressedLatentRotary(FULL, 2, 8): (
            "latent rotary_key",
            (5, 7, 2),
            (5, 7, 8),
        ),
    }
    for layer, (names, first, second) in expected.items():
        arrays = block_arrays(layer)
        assert arrays is not None
        assert arrays.names == tuple(names.split())
        assert arrays.shapes(batch, tokens) == (first, second)
        latent = names.startswith("latent")
        assert (arrays.representation is CacheRepresentation.COMPRESSED_LATENT_ROTARY) is latent
    assert block_arrays(LayerCachePolicy.NoState()) is None
    assert block_arrays(LayerCachePolicy.FixedState(tensors)) is None
