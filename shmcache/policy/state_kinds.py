"""The words for state tensors: what one is for, its axes, when it must be there, where it lives.

Contract: role decides residency. A recurrent state is brought in while its layer runs; what pooling
has finished is sealed and paged like attention blocks; everything else stays on the device.

Not here: the policy of one tensor, which puts these together (state.py).
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, TypeAlias

from shmcache.bounds import i32
from shmcache.errors import CachePolicyError
from shmcache.policy.fields import U32, Nz32
from shmcache.policy.payload import OrderedEnum, PayloadEnum, declare


class StateResidencyClass(Enum):
    """How a tensor's memory is managed."""

    ALWAYS_DEVICE_MUTABLE = "always_device_mutable"  # stays on the device, changes in place
    SEALABLE_PAGED = "sealable_paged"  # append-only, sealed into blocks, then paged
    LAYER_SCOPED_OFFLOADABLE = "layer_scoped_offloadable"  # on the device while its layer runs


class MutableStateResidency(Enum):
    """The residency classes that a tensor which changes in place may have."""

    ALWAYS_DEVICE_MUTABLE = "always_device_mutable"
    LAYER_SCOPED_OFFLOADABLE = "layer_scoped_offloadable"

    def to_class(self) -> StateResidencyClass:
        """The residency class of the same name."""
        return StateResidencyClass[self.name]


class StateTensorDtype(Enum):
    """The family of element types that a tensor may have."""

    FLOATING = "floating"
    FLOAT32 = "float32"
    INT32 = "int32"
    UINT32 = "uint32"

    def accepts_name(self, name: str) -> bool:
        """True for the dtype names, as a manifest spells them, of this family."""
        if self is StateTensorDtype.FLOATING:
            return name in ("Float16", "Bfloat16", "Float32", "Float64")
        return name == str(self.value).capitalize()


class PoolingStateComponent(OrderedEnum):
    """Which piece of a token-pooling stream a tensor holds."""

    PENDING_VALUES = "pending_values"
    PENDING_GATES = "pending_gates"
    POOLED = "pooled"
    OVERLAP_VALUES = "overlap_values"
    OVERLAP_GATES = "overlap_gates"


# Role: what a tensor is for -----------------------------------------------------------------------


class StateTensorRole(PayloadEnum, frozen=True, gc=False):
    """What a tensor is for; at most one tensor of a layer has a given role."""

    Convolution: ClassVar[type[StateTensorRoleConvolution]]
    Recurrent: ClassVar[type[StateTensorRoleRecurrent]]
    PrefixEmbedding: ClassVar[type[StateTensorRolePrefixEmbedding]]
    PositionDelta: ClassVar[type[StateTensorRolePositionDelta]]
    Pooling: ClassVar[type[StateTensorRolePooling]]

    def demanded_residency(self) -> StateResidencyClass:
        """The only residency class that a tensor of this role may have."""
        return StateResidencyClass.ALWAYS_DEVICE_MUTABLE


class StateTensorRoleConvolution(StateTensorRole, frozen=True, gc=False, tag="convolution"):
    """The window of a causal convolution; `slot` counts a layer's convolutions."""

    slot: U32


class StateTensorRoleRecurrent(StateTensorRole, frozen=True, gc=False, tag="recurrent"):
    """The state of a recurrence over the whole prefix."""

    def demanded_residency(self) -> StateResidencyClass:
        """Large and used by one layer: it may leave the device in between."""
        return StateResidencyClass.LAYER_SCOPED_OFFLOADABLE


class StateTensorRolePrefixEmbedding(
    StateTensorRole, frozen=True, gc=False, tag="prefix_embedding"
):
    """An embedding of the prefix as a whole."""


class StateTensorRolePositionDelta(StateTensorRole, frozen=True, gc=False, tag="position_delta"):
    """The offset between token count and rotary position."""


class StateTensorRolePooling(StateTensorRole, frozen=True, gc=False, tag="pooling"):
    """One piece of the token-pooling stream `stream`."""

    stream: U32
    component: PoolingStateComponent

    def demanded_residency(self) -> StateResidencyClass:
        """What is pooled only grows, so it is sealed and paged."""
        if self.component is PoolingStateComponent.POOLED:
            return StateResidencyClass.SEALABLE_PAGED
        return StateResidencyClass.ALWAYS_DEVICE_MUTABLE


AnyStateTensorRole: TypeAlias = (
    StateTensorRoleConvolution
    | StateTensorRoleRecurrent
    | StateTensorRolePrefixEmbedding
    | StateTensorRolePositionDelta
    | StateTensorRolePooling
)
declare(StateTensorRole, AnyStateTensorRole)

# Dimension: one axis of a symbolic shape ----------------------------------------------------------


class StateTensorDimension(PayloadEnum, frozen=True, gc=False):
    """One axis of a symbolic shape."""

    Batch: ClassVar[type[StateTensorDimensionBatch]]
    PrefixTokens: ClassVar[type[StateTensorDimensionPrefixTokens]]
    PrefixTokensDiv: ClassVar[type[StateTensorDimensionPrefixTokensDiv]]
    PrefixTokensRem: ClassVar[type[StateTensorDimensionPrefixTokensRem]]
    Fixed: ClassVar[type[StateTensorDimensionFixed]]
    Scalar: ClassVar[type[StateTensorDimensionScalar]]

    @staticmethod
    def fixed(value: int) -> StateTensorDimensionFixed:
        """`Fixed(value)` from a signed size.

        Errors: `CachePolicyError.Invalid` `not_positive`.
        """
        return StateTensorDimensionFixed(positive(value, "a fixed dimension"))

    def resolved(self, batch_size: int, prefix_tokens: int) -> int:
        """The size of this axis for a batch and a prefix."""
        raise NotImplementedError


class StateTensorDimensionBatch(StateTensorDimension, frozen=True, gc=False, tag="batch"):
    """The batch size."""

    def resolved(self, batch_size: int, prefix_tokens: int) -> int:
        """The batch size."""
        return batch_size


class StateTensorDimensionPrefixTokens(
    StateTensorDimension, frozen=True, gc=False, tag="prefix_tokens"
):
    """The number of prefix tokens."""

    def resolved(self, batch_size: int, prefix_tokens: int) -> int:
        """The prefix length."""
        return prefix_tokens


class StateTensorDimensionPrefixTokensDiv(
    StateTensorDimension, frozen=True, gc=False, tag="prefix_tokens_div"
):
    """The number of whole groups of `value` prefix tokens."""

    value: Nz32

    def resolved(self, batch_size: int, prefix_tokens: int) -> int:
        """The quotient."""
        return prefix_tokens // self.value


class StateTensorDimensionPrefixTokensRem(
    StateTensorDimension, frozen=True, gc=False, tag="prefix_tokens_rem"
):
    """The prefix tokens left over by groups of `value`."""

    value: Nz32

    def resolved(self, batch_size: int, prefix_tokens: int) -> int:
        """The remainder."""
        return prefix_tokens % self.value


class StateTensorDimensionFixed(StateTensorDimension, frozen=True, gc=False, tag="fixed"):
    """A size of the model."""

    value: Nz32

    def resolved(self, batch_size: int, prefix_tokens: int) -> int:
        """The size itself."""
        return self.value


class StateTensorDimensionScalar(StateTensorDimension, frozen=True, gc=False, tag="scalar"):
    """The only dimension of a scalar, which is stored as one element."""

    def resolved(self, batch_size: int, prefix_tokens: int) -> int:
        """One."""
        return 1


AnyStateTensorDimension: TypeAlias = (
    StateTensorDimensionBatch
    | StateTensorDimensionPrefixTokens
    | StateTensorDimensionPrefixTokensDiv
    | StateTensorDimensionPrefixTokensRem
    | StateTensorDimensionFixed
    | StateTensorDimensionScalar
)
declare(StateTensorDimension, AnyStateTensorDimension)

# Presence: for which prefixes a tensor must be there ----------------------------------------------


class StateTensorPresence(PayloadEnum, frozen=True, gc=False):
    """For which prefix lengths a tensor must be stored. It forces presence, never absence."""

    Required: ClassVar[type[StateTensorPresenceRequired]]
    Optional: ClassVar[type[StateTensorPresenceOptional]]
    PrefixRemainderNonZero: ClassVar[type[StateTensorPresencePrefixRemainderNonZero]]
    PrefixAtLeast: ClassVar[type[StateTensorPresencePrefixAtLeast]]

    def is_required_for(self, prefix_tokens: int) -> bool:
        """True when a prefix of this length is incomplete without the tensor."""
        raise NotImplementedError


class StateTensorPresenceRequired(StateTensorPresence, frozen=True, gc=False, tag="required"):
    """Always."""

    def is_required_for(self, prefix_tokens: int) -> bool:
        """True."""
        return True


class StateTensorPresenceOptional(StateTensorPresence, frozen=True, gc=False, tag="optional"):
    """Never."""

    def is_required_for(self, prefix_tokens: int) -> bool:
        """False."""
        return False


class StateTensorPresencePrefixRemainderNonZero(
    StateTensorPresence, frozen=True, gc=False, tag="prefix_remainder_non_zero"
):
    """While a group of `value` tokens is incomplete."""

    value: Nz32

    def is_required_for(self, prefix_tokens: int) -> bool:
        """True when tokens are left over."""
        return prefix_tokens % self.value != 0


class StateTensorPresencePrefixAtLeast(
    StateTensorPresence, frozen=True, gc=False, tag="prefix_at_least"
):
    """From `value` tokens on."""

    value: Nz32

    def is_required_for(self, prefix_tokens: int) -> bool:
        """True when the prefix is long enough."""
        return prefix_tokens >= self.value


AnyStateTensorPresence: TypeAlias = (
    StateTensorPresenceRequired
    | StateTensorPresenceOptional
    | StateTensorPresencePrefixRemainderNonZero
    | StateTensorPresencePrefixAtLeast
)
declare(StateTensorPresence, AnyStateTensorPresence)


def positive(value: int, what: str) -> int:
    """`value`, a signed size, if it is one.

    Errors: `CachePolicyError.Invalid` `not_positive`.
    """
    if i32(value, what) <= 0:
        raise CachePolicyError.Invalid("not_positive", f"{what} is {value}")
    return value
