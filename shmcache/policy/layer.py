"""What one decoder layer keeps: the kind of its state, how far it sees, and its geometry.

Why: two layouts of equal byte size can mean different things; a cache is reused only where the
declared policies of all layers are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeAlias, TypeVar

from shmcache.bounds import I32_MAX
from shmcache.errors import CachePolicyError
from shmcache.policy.attention import AnyAttentionPolicy
from shmcache.policy.fields import Nz32
from shmcache.policy.payload import PayloadEnum, declare
from shmcache.policy.state import (
    AnyStateComponentRole,
    StateComponentPolicy,
    StateComponentRoleAttentionKeys,
    StateComponentRoleAttentionValues,
    StateComponentRoleCompressedLatent,
    StateComponentRoleFixed,
    StateComponentRoleRotaryKeys,
    StateTensorPolicy,
    validate_state_tensors,
)
from shmcache.policy.state_kinds import (
    AnyStateTensorDimension,
    StateResidencyClass,
    StateTensorDimensionBatch,
    StateTensorDimensionFixed,
    StateTensorDimensionPrefixTokens,
    StateTensorDtype,
    StateTensorPresenceRequired,
    positive,
)

AttentionShapes: TypeAlias = tuple[
    tuple[AnyStateComponentRole, tuple[AnyStateTensorDimension, ...]], ...
]


class LayerCachePolicy(PayloadEnum, frozen=True, gc=False):
    """What one decoder layer keeps.

    Contract: the lower-case constructors take signed sizes and validate; a variant's class call and
    a decoder check domains only, `validate()` the rest.

    Units: head counts are those of this rank, after sharding; dimensions count elements.
    """

    NoState: ClassVar[type[LayerCachePolicyNoState]]
    KeyValue: ClassVar[type[LayerCachePolicyKeyValue]]
    KeyOnly: ClassVar[type[LayerCachePolicyKeyOnly]]
    CompressedLatentRotary: ClassVar[type[LayerCachePolicyCompressedLatentRotary]]
    FixedState: ClassVar[type[LayerCachePolicyFixedState]]
    KeyValueWithFixedState: ClassVar[type[LayerCachePolicyKeyValueWithFixedState]]
    KeyOnlyWithFixedState: ClassVar[type[LayerCachePolicyKeyOnlyWithFixedState]]

    @property
    def attention(self) -> AnyAttentionPolicy | None:
        """How far the layer sees; None for a layer without attention."""
        return None

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The two sizes of the attention arrays: heads and width, or the two widths of a latent.

        Every variant with attention declares it first, then these two.
        """
        names = self.__struct_fields__[1:3] if self.attention else ()
        return tuple(getattr(self, name) for name in names)

    @staticmethod
    def key_value(
        attention: AnyAttentionPolicy, num_key_value_heads: int, head_dim: int
    ) -> LayerCachePolicyKeyValue:
        """Keys and values.

        Errors: `CachePolicyError.Invalid` `not_positive`, then as `validate()`.
        """
        return _valid(
            LayerCachePolicyKeyValue(
                attention,
                positive(num_key_value_heads, "num_key_value_heads"),
                positive(head_dim, "head_dim"),
            )
        )

    @staticmethod
    def key_only(
        attention: AnyAttentionPolicy, num_key_heads: int, head_dim: int
    ) -> LayerCachePolicyKeyOnly:
        """Keys without values.

        Errors: `CachePolicyError.Invalid` `not_positive`, then as `validate()`.
        """
        return _valid(
            LayerCachePolicyKeyOnly(
                attention, positive(num_key_heads, "num_key_heads"), positive(head_dim, "head_dim")
            )
        )

    @staticmethod
    def compressed_latent_rotary(
        attention: AnyAttentionPolicy, latent_dim: int, rotary_dim: int
    ) -> LayerCachePolicyCompressedLatentRotary:
        """A latent and rotary keys, without heads.

        Errors: `CachePolicyError.Invalid` `not_positive`, then as `validate()`.
        """
        return _valid(
            LayerCachePolicyCompressedLatentRotary(
                attention, positive(latent_dim, "latent_dim"), positive(rotary_dim, "rotary_dim")
            )
        )

    @staticmethod
    def key_value_with_fixed_state(
        attention: AnyAttentionPolicy,
        num_key_value_heads: int,
        head_dim: int,
        tensors: Iterable[StateTensorPolicy],
    ) -> LayerCachePolicyKeyValueWithFixedState:
        """Keys, values and further tensors.

        Errors: `CachePolicyError.Invalid` `not_positive`, then as `validate()`.
        """
        return _valid(
            LayerCachePolicyKeyValueWithFixedState(
                attention,
                positive(num_key_value_heads, "num_key_value_heads"),
                positive(head_dim, "head_dim"),
                tuple(tensors),
            )
        )

    @staticmethod
    def key_only_with_fixed_state(
        attention: AnyAttentionPolicy,
        num_key_heads: int,
        head_dim: int,
        tensors: Iterable[StateTensorPolicy],
    ) -> LayerCachePolicyKeyOnlyWithFixedState:
        """Keys and further tensors.

        Errors: `CachePolicyError.Invalid` `not_positive`, then as `validate()`.
        """
        return _valid(
            LayerCachePolicyKeyOnlyWithFixedState(
                attention,
                positive(num_key_heads, "num_key_heads"),
                positive(head_dim, "head_dim"),
                tuple(tensors),
            )
        )

    @staticmethod
    def fixed_only(tensors: Iterable[StateTensorPolicy]) -> LayerCachePolicyFixedState:
        """No attention, only further tensors.

        Errors: `CachePolicyError.Invalid`, as `validate()`.
        """
        return _valid(LayerCachePolicyFixedState(tuple(tensors)))

    def attention_residency_class(self) -> StateResidencyClass | None:
        """How the attention arrays are managed; None without any."""
        return None if self.attention is None else StateResidencyClass.SEALABLE_PAGED

    def fixed_state(self) -> tuple[StateTensorPolicy, ...]:
        """The tensors beside attention."""
        tensors: tuple[StateTensorPolicy, ...] = getattr(self, "tensors", ())
        return tensors

    def components(self) -> tuple[StateComponentPolicy, ...]:
        """Attention parts first, then the fixed tensors as declared."""
        attention = (
            StateComponentPolicy(
                role=role,
                shape=shape,
                dtype=StateTensorDtype.FLOATING,
                residency=StateResidencyClass.SEALABLE_PAGED,
                presence=StateTensorPresenceRequired(),
            )
            for role, shape in self._attention_shapes()
        )
        fixed = (
            StateComponentPolicy(
                role=StateComponentRoleFixed(tensor.role),
                shape=tensor.shape,
                dtype=tensor.dtype,
                residency=tensor.residency,
                presence=tensor.presence,
            )
            for tensor in self.fixed_state()
        )
        return (*attention, *fixed)

    def validate(self) -> None:
        """Check what the fields' domains leave open.

        Errors: `CachePolicyError.Invalid` `attention_window_range`, `dimension_range`,
        `no_state_tensors`, then those of the tensor list.
        """
        window = self.attention.window if self.attention else None
        if window is not None and window > I32_MAX:
            raise CachePolicyError.Invalid("attention_window_range", f"the window is {window}")
        for size in self.dimensions:
            if size > I32_MAX:
                raise CachePolicyError.Invalid("dimension_range", f"a dimension is {size}")
        if "tensors" in self.__struct_fields__ and not self.fixed_state():
            raise CachePolicyError.Invalid("no_state_tensors", "declare the layer without them")
        validate_state_tensors(self.fixed_state())

    def _attention_shapes(self) -> AttentionShapes:
        return ()


class LayerCachePolicyNoState(LayerCachePolicy, frozen=True, gc=False, tag="no_state"):
    """Nothing is kept."""


class LayerCachePolicyKeyValue(LayerCachePolicy, frozen=True, gc=False, tag="key_value"):
    """Keys and values of each head."""

    attention: AnyAttentionPolicy
    num_key_value_heads: Nz32
    head_dim: Nz32

    def _attention_shapes(self) -> AttentionShapes:
        return _key_value_shapes(self.num_key_value_heads, self.head_dim)


class LayerCachePolicyKeyOnly(LayerCachePolicy, frozen=True, gc=False, tag="key_only"):
    """Keys of each head; stored values are a placeholder of width 1."""

    attention: AnyAttentionPolicy
    num_key_heads: Nz32
    head_dim: Nz32

    def _attention_shapes(self) -> AttentionShapes:
        return _key_shapes(self.num_key_heads, self.head_dim)


class LayerCachePolicyCompressedLatentRotary(
    LayerCachePolicy, frozen=True, gc=False, tag="compressed_latent_rotary"
):
    """One latent and one rotary key per token, shared by all heads."""

    attention: AnyAttentionPolicy
    latent_dim: Nz32
    rotary_dim: Nz32

    def _attention_shapes(self) -> AttentionShapes:
        latent, rotary = (
            (
                StateTensorDimensionBatch(),
                StateTensorDimensionPrefixTokens(),
                StateTensorDimensionFixed(width),
            )
            for width in (self.latent_dim, self.rotary_dim)
        )
        return (
            (StateComponentRoleCompressedLatent(), latent),
            (StateComponentRoleRotaryKeys(), rotary),
        )


class LayerCachePolicyFixedState(LayerCachePolicy, frozen=True, gc=False, tag="fixed_state"):
    """Tensors only."""

    tensors: tuple[StateTensorPolicy, ...]


class LayerCachePolicyKeyValueWithFixedState(
    LayerCachePolicy, frozen=True, gc=False, tag="key_value_with_fixed_state"
):
    """Keys, values and tensors."""

    attention: AnyAttentionPolicy
    num_key_value_heads: Nz32
    head_dim: Nz32
    tensors: tuple[StateTensorPolicy, ...]

    def _attention_shapes(self) -> AttentionShapes:
        return _key_value_shapes(self.num_key_value_heads, self.head_dim)


class LayerCachePolicyKeyOnlyWithFixedState(
    LayerCachePolicy, frozen=True, gc=False, tag="key_only_with_fixed_state"
):
    """Keys and tensors."""

    attention: AnyAttentionPolicy
    num_key_heads: Nz32
    head_dim: Nz32
    tensors: tuple[StateTensorPolicy, ...]

    def _attention_shapes(self) -> AttentionShapes:
        return _key_shapes(self.num_key_heads, self.head_dim)


AnyLayerCachePolicy: TypeAlias = (
    LayerCachePolicyNoState
    | LayerCachePolicyKeyValue
    | LayerCachePolicyKeyOnly
    | LayerCachePolicyCompressedLatentRotary
    | LayerCachePolicyFixedState
    | LayerCachePolicyKeyValueWithFixedState
    | LayerCachePolicyKeyOnlyWithFixedState
)
declare(LayerCachePolicy, AnyLayerCachePolicy)

_Policy = TypeVar("_Policy", bound=LayerCachePolicy)


def _valid(policy: _Policy) -> _Policy:
    policy.validate()
    return policy


def _key_shapes(heads: int, width: int) -> AttentionShapes:
    shape = (
        StateTensorDimensionBatch(),
        StateTensorDimensionFixed(heads),
        StateTensorDimensionPrefixTokens(),
        StateTensorDimensionFixed(width),
    )
    return ((StateComponentRoleAttentionKeys(), shape),)


def _key_value_shapes(heads: int, width: int) -> AttentionShapes:
    ((keys, shape),) = _key_shapes(heads, width)
    return (keys, shape), (StateComponentRoleAttentionValues(), shape)
