"""Who may use a prompt cache: what a caller expects of one, and what a loaded model is.

Why: equal bytes under another layout, checkpoint or split are wrong output without any error. So
both sides state what they are, completely, and are compared field by field before a byte is read.

Contract: never serialised; what a manifest keeps of them is in manifest.py. Layer lists have one
entry per owned layer, global layers `global_layer_start` up to, without, `global_layer_end`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self, TypeVar

import msgspec

from shmcache.bounds import I32_MAX, instance, usize
from shmcache.errors import CachePolicyError, LayerScheduleError, PromptCacheError
from shmcache.policy.attention import AttentionPolicy, AttentionPolicyFull, LayerSchedule
from shmcache.policy.fields import I32, Checked, Usize
from shmcache.policy.layer import AnyLayerCachePolicy, LayerCachePolicy
from shmcache.policy.topology import (
    LayerRange,
    PromptCacheStateSegment,
    PromptCacheTopology,
    is_blank,
    validate_segments,
)


class PromptCacheOptions(Checked, frozen=True, kw_only=True, gc=False):
    """How to publish: a label that is never compared, and whether an existing cache may go."""

    application_namespace: str | None = None
    replace_existing: bool = False

    @classmethod
    def new(cls, application_namespace: str | None = None, replace_existing: bool = False) -> Self:
        made = cls(application_namespace=application_namespace, replace_existing=replace_existing)
        if made.application_namespace is not None and is_blank(made.application_namespace):
            raise PromptCacheError.Malformed("namespace_empty")
        return made


class PromptCacheModelIdentity(Checked, frozen=True, kw_only=True, gc=False):
    """What a loaded model says of itself.

    Contract: `new` validates, the class call does not. Offsets are at most 0: a layer may lag the
    prefix, never lead it.
    """

    model_family: str
    effective_model_type: str
    architecture_fingerprint: str
    layer_count: Usize
    global_layer_start: Usize
    global_layer_end: Usize
    sink_tokens: Usize
    topology: PromptCacheTopology
    layer_layout: LayerSchedule[AnyLayerCachePolicy]
    layer_prefix_offsets: tuple[I32, ...]
    state_segments: tuple[PromptCacheStateSegment, ...]

    @classmethod
    def new(
        cls,
        model_family: str,
        effective_model_type: str,
        architecture_fingerprint: str,
        layer_count: int,
        global_layer_start: int,
        global_layer_end: int,
        sink_tokens: int,
        topology: PromptCacheTopology,
        layer_layout: LayerSchedule[AnyLayerCachePolicy],
        layer_prefix_offsets: Iterable[int],
        state_segments: Iterable[PromptCacheStateSegment],
    ) -> Self:
        made = cls(
            model_family=model_family,
            effective_model_type=effective_model_type,
            architecture_fingerprint=architecture_fingerprint,
            layer_count=layer_count,
            global_layer_start=global_layer_start,
            global_layer_end=global_layer_end,
            sink_tokens=sink_tokens,
            topology=topology,
            layer_layout=layer_layout,
            layer_prefix_offsets=tuple(layer_prefix_offsets),
            state_segments=tuple(state_segments),
        )
        _refuse_blank(made, "model_family", "effective_model_type", "architecture_fingerprint")
        return _validated(made)

    def validate(self) -> None:
        """Check the geometry.

        Errors: `PromptCacheError.Incompatible` `layer_range`, `geometry`; `Malformed` of the
        topology; `Incompatible` of the segments; `Policy` of a layer.
        """
        _validate_geometry(self, batch_size=1)

    @staticmethod
    def key_value_layouts(
        sliding_windows: Iterable[int | None], heads: int, head_dim: int
    ) -> LayerSchedule[AnyLayerCachePolicy]:
        """Key/value layers of one geometry, each with its window (None: full attention).

        Errors: `PromptCacheError.Malformed` `layout_window`, `layout_empty`; `Policy`.
        """
        layers: list[AnyLayerCachePolicy] = []
        for window in sliding_windows:
            try:
                attention = AttentionPolicy.from_sliding_window(window)
            except LayerScheduleError as error:
                raise PromptCacheError.Malformed("layout_window", str(error)) from error
            try:
                layers.append(LayerCachePolicy.key_value(attention, heads, head_dim))
            except CachePolicyError as error:
                raise PromptCacheError.Policy(error) from error
        return _layout(len(layers), layers)

    @staticmethod
    def compressed_layouts(
        layer_count: int, latent_dim: int, rotary_dim: int
    ) -> LayerSchedule[AnyLayerCachePolicy]:
        """Latent layers of one geometry, with full attention.

        Errors: `PromptCacheError.Policy`, then `Malformed` `layout_empty`.
        """
        try:
            layer = LayerCachePolicy.compressed_latent_rotary(
                AttentionPolicyFull(), latent_dim, rotary_dim
            )
        except CachePolicyError as error:
            raise PromptCacheError.Policy(error) from error
        return _layout(layer_count, (layer,) * usize(layer_count, "layer_count"))

    def state_segment(self, id: str) -> PromptCacheStateSegment:
        """The segment of this name.

        Errors: as `validate()`; `PromptCacheError.Incompatible` `segment_unknown`.
        """
        self.validate()
        for segment in self.state_segments:
            if segment.id == id:
                return segment
        raise PromptCacheError.Incompatible("segment_unknown", repr(id))

    def select_state_segment(self, id: str) -> Self:
        """The identity of one segment on its own: a rank that owns just these layers.

        Errors: as `state_segment`.
        """
        layers = self.state_segment(id).layers
        piece = slice(layers.start, layers.end)
        whole = LayerRange(start=0, end=layers.len())
        return _validated(
            msgspec.structs.replace(
                self,
                global_layer_start=self.global_layer_start + layers.start,
                global_layer_end=self.global_layer_start + layers.end,
                layer_layout=self.layer_layout[piece],
                layer_prefix_offsets=self.layer_prefix_offsets[piece],
                state_segments=(PromptCacheStateSegment(id=id, layers=whole),),
            )
        )


class PromptCacheDescriptor(Checked, frozen=True, kw_only=True, gc=False):
    """What a caller expects of a reusable prefix.

    Contract: `checkpoint_fingerprint` identifies the weights and is vouched for by the caller;
    `prefix_content_fingerprint` stands for all that made the activations. `new` validates, the
    class call does not.
    """

    model_family: str
    effective_model_type: str
    checkpoint_fingerprint: str
    prefix_content_fingerprint: str
    architecture_fingerprint: str
    layer_count: Usize
    global_layer_start: Usize
    global_layer_end: Usize
    batch_size: Usize
    layer_layout: LayerSchedule[AnyLayerCachePolicy]
    layer_prefix_offsets: tuple[I32, ...]
    state_segments: tuple[PromptCacheStateSegment, ...]
    sink_tokens: Usize
    topology: PromptCacheTopology

    @classmethod
    def new(
        cls,
        model_family: str,
        effective_model_type: str,
        checkpoint_fingerprint: str,
        prefix_content_fingerprint: str,
        architecture_fingerprint: str,
        layer_count: int,
        global_layer_start: int,
        global_layer_end: int,
        batch_size: int,
        layer_layout: LayerSchedule[AnyLayerCachePolicy],
        layer_prefix_offsets: Iterable[int],
        state_segments: Iterable[PromptCacheStateSegment],
        sink_tokens: int,
        topology: PromptCacheTopology,
    ) -> Self:
        made = cls(
            model_family=model_family,
            effective_model_type=effective_model_type,
            checkpoint_fingerprint=checkpoint_fingerprint,
            prefix_content_fingerprint=prefix_content_fingerprint,
            architecture_fingerprint=architecture_fingerprint,
            layer_count=layer_count,
            global_layer_start=global_layer_start,
            global_layer_end=global_layer_end,
            batch_size=batch_size,
            layer_layout=layer_layout,
            layer_prefix_offsets=tuple(layer_prefix_offsets),
            state_segments=tuple(state_segments),
            sink_tokens=sink_tokens,
            topology=topology,
        )
        _refuse_blank(
            made,
            "model_family",
            "effective_model_type",
            "checkpoint_fingerprint",
            "prefix_content_fingerprint",
            "architecture_fingerprint",
        )
        return _validated(made)

    @classmethod
    def from_model_identity(
        cls,
        model: PromptCacheModelIdentity,
        checkpoint_fingerprint: str,
        prefix_content_fingerprint: str,
        batch_size: int,
    ) -> Self:
        """What `model` needs. Blank fingerprints are not refused here.

        Errors: as `validate()`.
        """
        instance(model, PromptCacheModelIdentity, "model")
        return _validated(
            cls(
                **msgspec.structs.asdict(model),
                checkpoint_fingerprint=checkpoint_fingerprint,
                prefix_content_fingerprint=prefix_content_fingerprint,
                batch_size=batch_size,
            )
        )

    def with_topology(self, topology: PromptCacheTopology) -> Self:
        """The same expectation of another rank.

        Errors: as `validate()`.
        """
        return _validated(msgspec.structs.replace(self, topology=topology))

    def with_architecture_fingerprint(self, architecture_fingerprint: str) -> Self:
        """The same expectation of another architecture.

        Errors: `PromptCacheError.Malformed` `identity_string_empty`, then as `validate()`.
        """
        made = msgspec.structs.replace(self, architecture_fingerprint=architecture_fingerprint)
        _refuse_blank(made, "architecture_fingerprint")
        return _validated(made)

    def with_layer_count(self, layer_count: int) -> Self:
        """The same owned layers of a model of another depth.

        Errors: as `validate()`.
        """
        return _validated(msgspec.structs.replace(self, layer_count=layer_count))

    def validate(self) -> None:
        """Check the geometry.

        Errors: as `PromptCacheModelIdentity.validate`.
        """
        _validate_geometry(self, batch_size=self.batch_size)


def validate_prompt_cache_model_identity(
    expected: PromptCacheDescriptor, model: PromptCacheModelIdentity
) -> None:
    """Check that a descriptor was made for this model.

    Contract: checkpoint, content and batch size are not compared: a model does not know them.

    Errors: as both `validate()`; `PromptCacheError.Incompatible` `field:<name>` of the first
    difference.
    """
    expected.validate()
    model.validate()
    refuse_difference(expected, model, model.__struct_fields__)


def refuse_difference(expected: object, actual: object, names: Iterable[str]) -> None:
    """Compare these fields of two sides.

    Errors: `PromptCacheError.Incompatible` `field:<name>`.
    """
    for name in names:
        wanted, found = getattr(expected, name), getattr(actual, name)
        if wanted != found:
            short = isinstance(wanted, str | int)
            message = f"expected {wanted!r}, found {found!r}" if short else ""
            raise PromptCacheError.Incompatible(f"field:{name}", message)


class _OwnsLayers(Protocol):
    """What identities and manifests have in common."""

    @property
    def layer_count(self) -> int: ...
    @property
    def global_layer_start(self) -> int: ...
    @property
    def global_layer_end(self) -> int: ...
    @property
    def layer_layout(self) -> LayerSchedule[AnyLayerCachePolicy]: ...
    @property
    def layer_prefix_offsets(self) -> tuple[int, ...]: ...
    @property
    def state_segments(self) -> tuple[PromptCacheStateSegment, ...]: ...
    @property
    def topology(self) -> PromptCacheTopology: ...


def dimensions_agree(subject: _OwnsLayers, batch_size: int) -> bool:
    """True if a non-empty range of the model's layers is owned, and each list covers it."""
    owned = subject.global_layer_end - subject.global_layer_start
    return (
        0 < owned == len(subject.layer_layout) == len(subject.layer_prefix_offsets)
        and subject.global_layer_end <= subject.layer_count
        and 0 < batch_size <= I32_MAX
    )


_Identity = TypeVar("_Identity", bound=PromptCacheDescriptor | PromptCacheModelIdentity)


def _validated(identity: _Identity) -> _Identity:
    identity.validate()
    return identity


def _validate_geometry(subject: _OwnsLayers, batch_size: int) -> None:
    start, end = subject.global_layer_start, subject.global_layer_end
    if end < start:
        raise PromptCacheError.Incompatible("layer_range", f"layers {start} to {end}")
    offsets = subject.layer_prefix_offsets
    if not dimensions_agree(subject, batch_size) or any(offset > 0 for offset in offsets):
        raise PromptCacheError.Incompatible("geometry")
    subject.topology.validate()
    validate_segments(subject.state_segments, end - start, PromptCacheError.Incompatible)
    for layer in subject.layer_layout:
        try:
            layer.validate()
        except CachePolicyError as error:
            raise PromptCacheError.Policy(error) from error


def _refuse_blank(identity: object, *names: str) -> None:
    for name in names:
        if is_blank(getattr(identity, name)):
            raise PromptCacheError.Malformed("identity_string_empty", name)


def _layout(
    layer_count: int, layers: Iterable[AnyLayerCachePolicy]
) -> LayerSchedule[AnyLayerCachePolicy]:
    try:
        return LayerSchedule.new(layer_count, layers)
    except LayerScheduleError as error:
        raise PromptCacheError.Malformed("layout_empty", str(error)) from error
