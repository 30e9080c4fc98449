"""State tensors and components: vocabulary, rules, resolved shapes (policy 4 to 6)."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import I32_MAX, I32_MIN, U32_MAX, U64_MAX
from shmcache.errors import CachePolicyError
from shmcache.policy.state import (
    StateComponentRole,
    StateTensorOwner,
    StateTensorPolicy,
    validate_state_tensors,
)
from shmcache.policy.state_kinds import (
    MutableStateResidency,
    PoolingStateComponent,
    StateResidencyClass,
    StateTensorDimension,
    StateTensorDtype,
    StateTensorPresence,
    StateTensorRole,
)
from tests.policy.samples import between, dimensions, presences, roles, tensor_policies, u64s

BATCH, SCALAR = StateTensorDimension.Batch(), StateTensorDimension.Scalar()
FLOATING = StateTensorDtype.FLOATING
DEVICE = MutableStateResidency.ALWAYS_DEVICE_MUTABLE
DEMANDED: dict[Any, StateResidencyClass] = {
    StateTensorRole.Convolution(3): StateResidencyClass.ALWAYS_DEVICE_MUTABLE,
    StateTensorRole.Recurrent(): StateResidencyClass.LAYER_SCOPED_OFFLOADABLE,
    StateTensorRole.PrefixEmbedding(): StateResidencyClass.ALWAYS_DEVICE_MUTABLE,
    StateTensorRole.PositionDelta(): StateResidencyClass.ALWAYS_DEVICE_MUTABLE,
}
for _component in PoolingStateComponent:
    DEMANDED[StateTensorRole.Pooling(1, _component)] = (
        StateResidencyClass.SEALABLE_PAGED
        if _component is PoolingStateComponent.POOLED
        else StateResidencyClass.ALWAYS_DEVICE_MUTABLE
    )


def invalid(code: str) -> Any:
    """Expect this code."""
    return pytest.raises(CachePolicyError.Invalid, match=code, check=lambda e: e.code == code)


def policy(
    shape: tuple[Any, ...] = (BATCH,),
    role: Any = StateTensorRole.Convolution(0),  # noqa: B008 (immutable)
) -> StateTensorPolicy:
    return StateTensorPolicy.new(role, shape, FLOATING, DEVICE)


def test_spellings() -> None:
    """policy 4: names are the upper-case spellings."""
    spelled: dict[type[Enum], str] = {
        StateResidencyClass: "always_device_mutable sealable_paged layer_scoped_offloadable",
        MutableStateResidency: "always_device_mutable layer_scoped_offloadable",
        StateTensorDtype: "floating float32 int32 uint32",
        PoolingStateComponent: "pending_values pending_gates pooled overlap_values overlap_gates",
    }
    for kind, text in spelled.items():
        assert [one.value for one in kind] == text.split()
        assert [one.name for one in kind] == text.upper().split()
    for one in MutableStateResidency:
        assert one.to_class() is StateResidencyClass(one.value)


def test_dtype_names() -> None:
    """policy 5: case-sensitive, exactly these."""
    accepted = {
        StateTensorDtype.FLOATING: {"Float16", "Bfloat16", "Float32", "Float64"},
        StateTensorDtype.FLOAT32: {"Float32"},
        StateTensorDtype.INT32: {"Int32"},
        StateTensorDtype.UINT32: {"Uint32"},
    }
    plain = "Bool Uint8 Uint16 Uint32 Uint64 Int8 Int16 Int32 Int64 Float16 Bfloat16 Float32"
    names = {*plain.split(), "Float64", "float32", "FLOAT32", "Float", "F32", "", " Int32"}
    for dtype, expected in accepted.items():
        tensor = msgspec.structs.replace(policy(), dtype=dtype)
        assert {name for name in names if tensor.accepts_dtype_name(name)} == expected


def test_a_fixed_dimension_is_positive() -> None:
    """policy 4"""
    assert StateTensorDimension.fixed(16) == StateTensorDimension.Fixed(value=16)
    assert StateTensorDimension.fixed(I32_MAX).value == I32_MAX
    for value in (0, -1, I32_MIN):
        with invalid("not_positive"):
            StateTensorDimension.fixed(value)
    for value in (I32_MAX + 1, I32_MIN - 1):
        with pytest.raises(ValueError, match="fixed dimension"):
            StateTensorDimension.fixed(value)


def test_stable_names() -> None:
    """policy 4"""
    fixed, pooling = StateComponentRole.Fixed, StateTensorRole.Pooling
    names = {
        StateComponentRole.AttentionKeys(): "attention.keys",
        StateComponentRole.AttentionValues(): "attention.values",
        StateComponentRole.CompressedLatent(): "attention.compressed_latent",
        StateComponentRole.RotaryKeys(): "attention.rotary_keys",
        fixed(StateTensorRole.Convolution(7)): "state.convolution.7",
        fixed(StateTensorRole.Recurrent()): "state.recurrent",
        fixed(StateTensorRole.PrefixEmbedding()): "state.prefix_embedding",
        fixed(StateTensorRole.PositionDelta()): "state.position_delta",
    }
    for component in PoolingStateComponent:
        names[fixed(pooling(2, component))] = f"state.pooling.2.{component.value}"
    assert {role: role.stable_name() for role in names} == names


def test_orders() -> None:
    """policy 1.4: variants as declared, then payload."""
    pooling = StateTensorRole.Pooling
    ordered: list[list[Any]] = [
        [
            StateTensorRole.Convolution(0),
            StateTensorRole.Convolution(U32_MAX),
            StateTensorRole.Recurrent(),
            StateTensorRole.PrefixEmbedding(),
            StateTensorRole.PositionDelta(),
            *(pooling(0, component) for component in PoolingStateComponent),
            pooling(1, PoolingStateComponent.PENDING_VALUES),
        ],
        [StateTensorOwner.Layer(0), StateTensorOwner.Layer(U64_MAX)],
        [
            StateComponentRole.AttentionKeys(),
            StateComponentRole.AttentionValues(),
            StateComponentRole.CompressedLatent(),
            StateComponentRole.RotaryKeys(),
            StateComponentRole.Fixed(StateTensorRole.Convolution(1)),
            StateComponentRole.Fixed(StateTensorRole.Recurrent()),
        ],
        list(PoolingStateComponent),
    ]
    for values in ordered:
        assert sorted(values[1::2] + values[::2]) == values
        assert all(one < other for one, other in itertools.combinations(values, 2))
    with pytest.raises(TypeError, match="not supported"):
        _ = ordered[0][0] < ordered[1][0]


def test_new_validates_and_requires() -> None:
    """policy 5"""
    made = policy()
    assert made.presence == StateTensorPresence.Required()
    assert made.residency is made.residency_class() is StateResidencyClass.ALWAYS_DEVICE_MUTABLE
    assert policy([BATCH]).shape == (BATCH,)  # type: ignore[arg-type]
    with invalid("invalid_shape"):
        policy(())
    with invalid("wrong_residency"):
        policy(role=StateTensorRole.Recurrent())
    immutable: Any = StateResidencyClass.ALWAYS_DEVICE_MUTABLE
    with pytest.raises(TypeError, match="residency"):
        StateTensorPolicy.new(StateTensorRole.Convolution(0), (BATCH,), FLOATING, immutable)


def test_presence_builders_change_presence_only_and_validate_nothing() -> None:
    """policy 5"""
    bare = msgspec.structs.replace(policy(), shape=())  # which no validation would accept
    for built, presence in (
        (bare.optional(), StateTensorPresence.Optional()),
        (
            bare.when_prefix_remainder_nonzero(4),
            StateTensorPresence.PrefixRemainderNonZero(4),
        ),
        (bare.when_prefix_at_least(4), StateTensorPresence.PrefixAtLeast(4)),
    ):
        assert built == msgspec.structs.replace(bare, presence=presence)
    for divisor in (0, -1, U32_MAX + 1):
        with pytest.raises(ValueError, match="value must be between 1"):
            bare.when_prefix_at_least(divisor)
        with pytest.raises(ValueError, match="value must be between 1"):
            bare.when_prefix_remainder_nonzero(divisor)


def test_when_a_tensor_is_required() -> None:
    """policy 5, its examples"""
    at_least = policy().when_prefix_at_least(4)
    assert [at_least.is_required_for(tokens) for tokens in (3, 4)] == [False, True]
    remainder = policy().when_prefix_remainder_nonzero(4)
    assert [remainder.is_required_for(tokens) for tokens in (0, 8, 9)] == [False, False, True]
    assert policy().is_required_for(0)
    assert not policy().optional().is_required_for(U64_MAX)
    with pytest.raises(ValueError, match="prefix_tokens"):
        policy().is_required_for(-1)


def test_resolved_shapes() -> None:
    """policy 5, its examples for batch 3 and 10 tokens"""
    div, rem = StateTensorDimension.PrefixTokensDiv, StateTensorDimension.PrefixTokensRem
    fixed, tokens = StateTensorDimension.Fixed, StateTensorDimension.PrefixTokens()
    for shape, expected in (
        ((BATCH, div(4), fixed(5)), (3, 2, 5)),
        ((BATCH, rem(5)), (3, 0)),
        ((SCALAR,), (1,)),
        ((tokens, BATCH), (10, 3)),
    ):
        assert policy(shape).resolved_shape(3, 10) == expected
    too_large: tuple[tuple[tuple[Any, ...], int, int], ...] = (
        ((fixed(I32_MAX + 1),), 1, 1),
        ((BATCH,), I32_MAX + 1, 1),
        ((BATCH, tokens), 1, I32_MAX + 1),
        ((div(1),), 1, U64_MAX),
        ((rem(U32_MAX),), 1, I32_MAX + 1),
    )
    for wide, batch, prefix in too_large:
        with invalid("resolved_dimension_range"):
            policy(wide).resolved_shape(batch, prefix)
    assert policy((div(2), fixed(I32_MAX))).resolved_shape(0, U32_MAX) == (I32_MAX, I32_MAX)
    for batch, prefix in ((-1, 0), (0, -1), (0, U64_MAX + 1)):
        with pytest.raises(ValueError, match="must be between"):
            policy().resolved_shape(batch, prefix)


@given(tensor_policies, u64s, between(0, 10_000))
def test_resolution_axis_by_axis(tensor: StateTensorPolicy, batch: int, tokens: int) -> None:
    """policy 5: against the table, read literally"""
    rules: dict[str, Any] = {
        "batch": lambda _: batch,
        "prefix_tokens": lambda _: tokens,
        "prefix_tokens_div": lambda one: tokens // one.value,
        "prefix_tokens_rem": lambda one: tokens % one.value,
        "fixed": lambda one: one.value,
        "scalar": lambda _: 1,
    }
    expected = tuple(rules[str(one.__struct_config__.tag)](one) for one in tensor.shape)
    if max(expected, default=0) > I32_MAX:
        with invalid("resolved_dimension_range"):
            tensor.resolved_shape(batch, tokens)
    else:
        assert tensor.resolved_shape(batch, tokens) == expected


@given(presences, st.integers(0, 100))
def test_presence_against_the_table(presence: Any, tokens: int) -> None:
    """policy 5"""
    value = getattr(presence, "value", 1)
    table = {
        "required": True,
        "optional": False,
        "prefix_remainder_non_zero": tokens % value != 0,
        "prefix_at_least": tokens >= value,
    }
    tensor = msgspec.structs.replace(policy(), presence=presence)
    assert tensor.is_required_for(tokens) is table[presence.__struct_config__.tag]


def test_each_role_has_one_residency() -> None:
    """policy 5.1, rule 3"""
    for (role, demanded), given_class in itertools.product(DEMANDED.items(), StateResidencyClass):
        arguments: Any = (role, (BATCH,), FLOATING, given_class)
        if given_class is demanded:
            assert StateTensorPolicy.new_with_residency(*arguments).residency is demanded
        else:
            with invalid("wrong_residency"):
                StateTensorPolicy.new_with_residency(*arguments)
    pooled = StateTensorRole.Pooling(0, PoolingStateComponent.POOLED)
    for residency in MutableStateResidency:
        with invalid("wrong_residency"):
            StateTensorPolicy.new(pooled, (BATCH,), FLOATING, residency)


def test_shapes_of_scalars() -> None:
    """policy 5.1, rule 2"""
    assert policy((SCALAR,)).shape == (SCALAR,)
    for shape in ((), (SCALAR, SCALAR), (BATCH, SCALAR), (SCALAR, BATCH)):
        with invalid("invalid_shape"):
            policy(shape)


def test_roles_are_unique_by_payload() -> None:
    """policy 5.1, rule 1"""
    pooling = StateTensorRole.Pooling
    gates, values = PoolingStateComponent.OVERLAP_GATES, PoolingStateComponent.OVERLAP_VALUES
    distinct = [
        StateTensorRole.Convolution(0),
        StateTensorRole.Convolution(1),
        pooling(0, gates),
        pooling(1, gates),
        pooling(0, values),
    ]
    tensors = [policy(role=role) for role in distinct]
    validate_state_tensors(tensors)
    for tensor in tensors:
        with invalid("duplicate_role"):
            validate_state_tensors([*tensors, tensor])


@given(st.lists(tensor_policies, max_size=4))
def test_the_first_failure_wins(tensors: list[StateTensorPolicy]) -> None:
    """policy 5.1: per tensor role, shape, residency; tensors in order."""
    expected, seen = "", []
    for tensor in tensors:
        scalar = SCALAR in tensor.shape
        demanded = DEMANDED.get(tensor.role)
        if demanded is None:  # another slot or stream of a role in the table
            same_kind = (role for role in DEMANDED if _kind(role) == _kind(tensor.role))
            demanded = DEMANDED[next(same_kind)]
        if tensor.role in seen:
            expected = "duplicate_role"
        elif not tensor.shape or (scalar and tensor.shape != (SCALAR,)):
            expected = "invalid_shape"
        elif tensor.residency is not demanded:
            expected = "wrong_residency"
        if expected:
            break
        seen.append(tensor.role)
    if expected:
        with invalid(expected):
            validate_state_tensors(tensors)
    else:
        validate_state_tensors(tensors)


def _kind(role: Any) -> tuple[Any, ...]:
    return role.__struct_config__.tag, getattr(role, "component", None)


@given(roles, dimensions)
def test_what_is_not_checked(role: Any, dimension: Any) -> None:
    """policy 5.1: dtype and presence against role, and sizes above i32."""
    shape = (StateTensorDimension.Fixed(U32_MAX),) if dimension == SCALAR else (dimension,)
    demanded = role.demanded_residency()
    for dtype in StateTensorDtype:
        made = StateTensorPolicy.new_with_residency(role, shape, dtype, demanded)
        validate_state_tensors([made.optional()])
