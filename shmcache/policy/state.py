"""State beside attention: the policy of one tensor, and every component of a layer in one form.

Why: convolution windows, recurrent states and pooled token streams live beside keys and values, and
a cache is complete only with them. A policy says so before any tensor exists: its shape is symbolic
and resolves against a batch and a prefix length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self, TypeAlias

import msgspec

from shmcache.bounds import I32_MAX, instance, usize
from shmcache.errors import CachePolicyError
from shmcache.policy.fields import Checked, Usize
from shmcache.policy.payload import PayloadEnum, declare
from shmcache.policy.state_kinds import (
    AnyStateTensorDimension,
    AnyStateTensorPresence,
    AnyStateTensorRole,
    MutableStateResidency,
    StateResidencyClass,
    StateTensorDimensionScalar,
    StateTensorDtype,
    StateTensorPresenceOptional,
    StateTensorPresencePrefixAtLeast,
    StateTensorPresencePrefixRemainderNonZero,
    StateTensorPresenceRequired,
    StateTensorRoleConvolution,
    StateTensorRolePooling,
)


class StateTensorPolicy(Checked, frozen=True, kw_only=True, gc=False):
    """Role, symbolic shape, dtype family, residency and presence of one non-attention tensor.

    Contract: `new` and `new_with_residency` validate, the class call and a decoder do not. What is
    pooled can only be made by `new_with_residency`: no mutable tensor may be sealed.
    """

    role: AnyStateTensorRole
    shape: tuple[AnyStateTensorDimension, ...]
    dtype: StateTensorDtype
    residency: StateResidencyClass
    presence: AnyStateTensorPresence

    @classmethod
    def new(
        cls,
        role: AnyStateTensorRole,
        shape: Iterable[AnyStateTensorDimension],
        dtype: StateTensorDtype,
        residency: MutableStateResidency,
    ) -> Self:
        given = instance(residency, MutableStateResidency, "residency")
        return cls.new_with_residency(role, shape, dtype, given.to_class())

    @classmethod
    def new_with_residency(
        cls,
        role: AnyStateTensorRole,
        shape: Iterable[AnyStateTensorDimension],
        dtype: StateTensorDtype,
        residency: StateResidencyClass,
    ) -> Self:
        """A required tensor of any residency class.

        Errors: `CachePolicyError.Invalid` `invalid_shape`, `wrong_residency`.
        """
        made = cls(
            role=role,
            shape=tuple(shape),
            dtype=dtype,
            residency=residency,
            presence=StateTensorPresenceRequired(),
        )
        validate_state_tensors((made,))
        return made

    def optional(self) -> Self:
        """The same tensor, never required."""
        return msgspec.structs.replace(self, presence=StateTensorPresenceOptional())

    def when_prefix_remainder_nonzero(self, divisor: int) -> Self:
        """The same tensor, required while `divisor` does not divide the prefix length."""
        presence = StateTensorPresencePrefixRemainderNonZero(divisor)
        return msgspec.structs.replace(self, presence=presence)

    def when_prefix_at_least(self, divisor: int) -> Self:
        """The same tensor, required from `divisor` prefix tokens on."""
        return msgspec.structs.replace(self, presence=StateTensorPresencePrefixAtLeast(divisor))

    def is_required_for(self, prefix_tokens: int) -> bool:
        """True when a prefix of this length is incomplete without this tensor."""
        return self.presence.is_required_for(usize(prefix_tokens, "prefix_tokens"))

    def residency_class(self) -> StateResidencyClass:
        """Where the tensor lives."""
        return self.residency

    def resolved_shape(self, batch_size: int, prefix_tokens: int) -> tuple[int, ...]:
        """The shape for a batch and a prefix. A size may be 0; a scalar is stored as (1,).

        Errors: `CachePolicyError.Invalid` `resolved_dimension_range` for a size above i32.
        """
        usize(batch_size, "batch_size")
        usize(prefix_tokens, "prefix_tokens")
        shape = tuple(axis.resolved(batch_size, prefix_tokens) for axis in self.shape)
        if any(size > I32_MAX for size in shape):
            raise CachePolicyError.Invalid("resolved_dimension_range", f"the shape is {shape}")
        return shape

    def accepts_dtype_name(self, name: str) -> bool:
        """True for the dtype names, as a manifest spells them, of the family. Case matters."""
        return self.dtype.accepts_name(name)


def validate_state_tensors(tensors: Iterable[StateTensorPolicy]) -> None:
    """Check the tensors of one layer, in order.

    Errors: `CachePolicyError.Invalid` `duplicate_role`, `invalid_shape`, `wrong_residency`.
    """
    roles: set[AnyStateTensorRole] = set()
    for tensor in tensors:
        name = StateComponentRoleFixed(tensor.role).stable_name()
        if tensor.role in roles:
            raise CachePolicyError.Invalid("duplicate_role", f"{name} is declared twice")
        roles.add(tensor.role)
        scalars = sum(isinstance(axis, StateTensorDimensionScalar) for axis in tensor.shape)
        if not tensor.shape or (scalars and len(tensor.shape) != 1):
            raise CachePolicyError.Invalid("invalid_shape", f"{name}: no axis, or scalar and more")
        demanded = tensor.role.demanded_residency()
        if tensor.residency is not demanded:
            raise CachePolicyError.Invalid("wrong_residency", f"{name} must be {demanded.value}")


class StateTensorOwner(PayloadEnum, frozen=True, gc=False):
    """Whose tensor it is: so far always a layer's, by its index in the whole model."""

    Layer: ClassVar[type[StateTensorOwnerLayer]]


class StateTensorOwnerLayer(StateTensorOwner, frozen=True, gc=False, tag="layer"):
    """The layer with the global index `value`."""

    value: Usize


AnyStateTensorOwner: TypeAlias = StateTensorOwnerLayer
declare(StateTensorOwner, AnyStateTensorOwner)


class StateComponentRole(PayloadEnum, frozen=True, gc=False):
    """What one component of a layer's state is, attention or not."""

    AttentionKeys: ClassVar[type[StateComponentRoleAttentionKeys]]
    AttentionValues: ClassVar[type[StateComponentRoleAttentionValues]]
    CompressedLatent: ClassVar[type[StateComponentRoleCompressedLatent]]
    RotaryKeys: ClassVar[type[StateComponentRoleRotaryKeys]]
    Fixed: ClassVar[type[StateComponentRoleFixed]]

    def stable_name(self) -> str:
        """A dotted name for metrics and messages, the same in every release."""
        return f"attention.{self.__struct_config__.tag}".replace(".attention_", ".")


class StateComponentRoleAttentionKeys(
    StateComponentRole, frozen=True, gc=False, tag="attention_keys"
):
    """Keys of attention heads."""


class StateComponentRoleAttentionValues(
    StateComponentRole, frozen=True, gc=False, tag="attention_values"
):
    """Values of attention heads."""


class StateComponentRoleCompressedLatent(
    StateComponentRole, frozen=True, gc=False, tag="compressed_latent"
):
    """The latent that keys and values are expanded from."""


class StateComponentRoleRotaryKeys(StateComponentRole, frozen=True, gc=False, tag="rotary_keys"):
    """The part of the keys that carries the position, beside a latent."""


class StateComponentRoleFixed(StateComponentRole, frozen=True, gc=False, tag="fixed"):
    """A tensor that is no attention."""

    value: AnyStateTensorRole

    def stable_name(self) -> str:
        """`state.`, the role, and what tells tensors of one role apart."""
        name = f"state.{self.value.__struct_config__.tag}"
        if isinstance(self.value, StateTensorRoleConvolution):
            return f"{name}.{self.value.slot}"
        if isinstance(self.value, StateTensorRolePooling):
            return f"{name}.{self.value.stream}.{self.value.component.value}"
        return name


AnyStateComponentRole: TypeAlias = (
    StateComponentRoleAttentionKeys
    | StateComponentRoleAttentionValues
    | StateComponentRoleCompressedLatent
    | StateComponentRoleRotaryKeys
    | StateComponentRoleFixed
)
declare(StateComponentRole, AnyStateComponentRole)


class StateComponentPolicy(Checked, frozen=True, kw_only=True, gc=False):
    """One component of a layer's state in the form that all share.

    Contract: made by `LayerCachePolicy.components()`, never validated on its own.
    """

    role: AnyStateComponentRole
    shape: tuple[AnyStateTensorDimension, ...]
    dtype: StateTensorDtype
    residency: StateResidencyClass
    presence: AnyStateTensorPresence
