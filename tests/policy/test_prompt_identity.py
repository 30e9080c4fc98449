"""Descriptor, model identity and options: construction, geometry, comparison (prompt_cache 5)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shmcache.bounds import I32_MAX, U64_MAX
from shmcache.errors import CachePolicyError, PromptCacheError
from shmcache.policy.attention import AttentionPolicy, LayerSchedule
from shmcache.policy.layer import LayerCachePolicy
from shmcache.policy.prompt_identity import (
    PromptCacheDescriptor,
    PromptCacheModelIdentity,
    PromptCacheOptions,
    validate_prompt_cache_model_identity,
)
from shmcache.policy.topology import PromptCacheStateSegment, PromptCacheTopology

Malformed, Incompatible = PromptCacheError.Malformed, PromptCacheError.Incompatible
FULL = AttentionPolicy.Full()
MODEL: dict[str, Any] = {
    "model_family": "sample",
    "effective_model_type": "sample_small",
    "architecture_fingerprint": "sha256:aa",
    "layer_count": 30,
    "global_layer_start": 20,
    "global_layer_end": 26,
    "sink_tokens": 4,
    "topology": PromptCacheTopology.new((3, 2), None, None, True),
    "layer_layout": LayerSchedule(LayerCachePolicy.key_value(FULL, 1, n) for n in range(1, 7)),
    "layer_prefix_offsets": (0, 0, -1, 0, -2, 0),
    "state_segments": (
        PromptCacheStateSegment.new("a", range(4)),
        PromptCacheStateSegment.new("b", range(4, 6)),
    ),
}
OWN: dict[str, Any] = {
    "checkpoint_fingerprint": "weights",
    "prefix_content_fingerprint": "text",
    "batch_size": 2,
}
MODEL_ORDER = tuple(MODEL)
DESCRIPTOR_ORDER = (
    "model_family",
    "effective_model_type",
    "checkpoint_fingerprint",
    "prefix_content_fingerprint",
    "architecture_fingerprint",
    "layer_count",
    "global_layer_start",
    "global_layer_end",
    "batch_size",
    "layer_layout",
    "layer_prefix_offsets",
    "state_segments",
    "sink_tokens",
    "topology",
)
model = PromptCacheModelIdentity(**MODEL)
descriptor = PromptCacheDescriptor(**MODEL, **OWN)
BAD_LAYER = LayerCachePolicy.KeyValue(FULL, I32_MAX + 1, 1)

# What changes in a good identity, and how its validation answers, in the order of the rules.
GEOMETRY: tuple[tuple[dict[str, Any], PromptCacheError], ...] = (
    ({"global_layer_end": 19, "layer_count": 0}, Incompatible("layer_range")),
    ({"layer_count": 0}, Incompatible("geometry")),
    ({"layer_count": 25}, Incompatible("geometry")),
    ({"global_layer_end": 20, "layer_layout": LayerSchedule(())}, Incompatible("geometry")),
    ({"global_layer_end": 27}, Incompatible("geometry")),
    ({"global_layer_start": 0}, Incompatible("geometry")),
    ({"layer_layout": MODEL["layer_layout"][1:]}, Incompatible("geometry")),
    ({"layer_prefix_offsets": (0,) * 5}, Incompatible("geometry")),
    ({"layer_prefix_offsets": (0, 0, 0, 0, 0, 1)}, Incompatible("geometry")),
    (
        {"layer_prefix_offsets": (1,) * 6, "topology": PromptCacheTopology.default()},
        Incompatible("geometry"),
    ),
    (
        {
            "topology": PromptCacheTopology(stage=(1, 1), addressable_state_replicated=True),
            "state_segments": (),
        },
        Malformed("topology_stage"),
    ),
    (
        {"state_segments": (), "layer_layout": LayerSchedule([BAD_LAYER] * 6)},
        Incompatible("segments_missing"),
    ),
    ({"state_segments": MODEL["state_segments"][:1]}, Incompatible("segments_incomplete")),
    (
        {"layer_layout": LayerSchedule([*MODEL["layer_layout"][:5], BAD_LAYER])},
        PromptCacheError.Policy(CachePolicyError.Invalid("dimension_range")),
    ),
)


def refused(expected: PromptCacheError) -> Any:
    """Expect this whole error."""
    return pytest.raises(PromptCacheError, check=lambda error: error == expected)


def test_orders_of_fields_and_of_new() -> None:
    """prompt_cache 5.1, 5.2"""
    assert PromptCacheModelIdentity.__struct_fields__ == MODEL_ORDER
    assert PromptCacheDescriptor.__struct_fields__ == DESCRIPTOR_ORDER
    both = {**MODEL, **OWN}
    assert PromptCacheModelIdentity.new(*MODEL.values()) == model
    assert PromptCacheModelIdentity.new(**MODEL) == model
    assert PromptCacheDescriptor.new(*(both[name] for name in DESCRIPTOR_ORDER)) == descriptor
    assert PromptCacheDescriptor.new(**both) == descriptor
    lists = {**both, "layer_prefix_offsets": [0, 0, -1, 0, -2, 0]}
    assert PromptCacheDescriptor.new(**lists) == descriptor
    assert len({model, PromptCacheModelIdentity(**MODEL)}) == 1
    assert len({descriptor, PromptCacheDescriptor(**both)}) == 1


def test_blank_strings_are_refused_by_new_only() -> None:
    """prompt_cache 5.1, 5.2: before any geometry; white space counts as nothing."""
    strings = [name for name in DESCRIPTOR_ORDER if isinstance({**MODEL, **OWN}[name], str)]
    assert len(strings) == 5
    blank = Malformed("identity_string_empty")
    for name in strings:
        for value in ("", "  ", "\n\t", "\u00a0\u2003"):
            worse = {"layer_count": 0, name: value}
            with refused(blank):
                PromptCacheDescriptor.new(**{**MODEL, **OWN, **worse})
            PromptCacheDescriptor(**{**MODEL, **OWN, name: value}).validate()
            if name in MODEL:
                with refused(blank):
                    PromptCacheModelIdentity.new(**{**MODEL, **worse})
                PromptCacheModelIdentity(**{**MODEL, name: value}).validate()
    padded = PromptCacheModelIdentity.new(**{**MODEL, "model_family": " x "})
    assert padded.model_family == " x "


def test_geometry() -> None:
    """prompt_cache 5.3, for both kinds of identity"""
    model.validate()
    descriptor.validate()
    for change, error in GEOMETRY:
        with refused(error):
            PromptCacheModelIdentity(**{**MODEL, **change}).validate()
        with refused(error):
            PromptCacheModelIdentity.new(**{**MODEL, **change})
        with refused(error):
            PromptCacheDescriptor(**{**MODEL, **OWN, **change}).validate()
        with refused(error):
            PromptCacheDescriptor.new(**{**MODEL, **OWN, **change})


def test_batch_sizes() -> None:
    """prompt_cache 5.3: 1 to 2**31 - 1"""
    for batch_size in (1, I32_MAX):
        msgspec.structs.replace(descriptor, batch_size=batch_size).validate()
    for batch_size in (0, I32_MAX + 1, U64_MAX):
        with refused(Incompatible("geometry")):
            msgspec.structs.replace(descriptor, batch_size=batch_size).validate()


def test_offsets_have_no_lower_bound() -> None:
    """prompt_cache 5.3"""
    msgspec.structs.replace(model, layer_prefix_offsets=(-(2**31),) * 6).validate()


def test_policy_errors_name_their_source() -> None:
    """prompt_cache 1"""
    layout = LayerSchedule([BAD_LAYER] * 6)
    with pytest.raises(PromptCacheError.Policy) as caught:
        msgspec.structs.replace(model, layer_layout=layout).validate()
    assert caught.value.source == CachePolicyError.Invalid("dimension_range")
    assert caught.value.__cause__ is caught.value.source


def test_a_descriptor_from_a_model() -> None:
    """prompt_cache 5.1: blank fingerprints are not refused here."""
    made = PromptCacheDescriptor.from_model_identity(model, "weights", "text", 2)
    assert made == descriptor
    assert PromptCacheDescriptor.from_model_identity(model, "", " ", 1).batch_size == 1
    with refused(Incompatible("geometry")):
        PromptCacheDescriptor.from_model_identity(model, "weights", "text", 0)
    with pytest.raises(TypeError, match="model"):
        PromptCacheDescriptor.from_model_identity(descriptor, "w", "t", 1)  # type: ignore[arg-type]


def test_copies_with_one_change_are_validated() -> None:
    """prompt_cache 5.1"""
    default = PromptCacheTopology.default()
    replace = msgspec.structs.replace
    assert descriptor.with_topology(default) == replace(descriptor, topology=default)
    assert descriptor.with_layer_count(26) == replace(descriptor, layer_count=26)
    other = descriptor.with_architecture_fingerprint("sha256:bb")
    assert other == replace(descriptor, architecture_fingerprint="sha256:bb")
    broken = PromptCacheTopology(shard=(0, 0), addressable_state_replicated=True)
    with refused(Malformed("topology_shard")):
        descriptor.with_topology(broken)
    with refused(Incompatible("geometry")):
        descriptor.with_layer_count(25)
    bad = replace(descriptor, layer_count=0)
    with refused(Malformed("identity_string_empty")):
        bad.with_architecture_fingerprint(" ")
    with refused(Incompatible("geometry")):
        bad.with_architecture_fingerprint("x")
    with refused(Incompatible("geometry")):
        bad.with_topology(default)


def test_key_value_layouts() -> None:
    """prompt_cache 5.2"""
    build = PromptCacheModelIdentity.key_value_layouts
    assert list(build([None, 7], 2, 8)) == [
        LayerCachePolicy.KeyValue(FULL, 2, 8),
        LayerCachePolicy.KeyValue(AttentionPolicy.Sliding(7), 2, 8),
    ]
    not_positive = PromptCacheError.Policy(CachePolicyError.Invalid("not_positive"))
    for windows, heads, head_dim, error in (
        ([0], 0, 8, Malformed("layout_window")),
        ([None, -1], 2, 8, Malformed("layout_window")),
        ([None, -1], 0, 8, not_positive),  # the first item is built before the second
        ([None], 2, 0, not_positive),
        ([], 0, 0, Malformed("layout_empty")),
    ):
        with refused(error):
            build(iter(windows), heads, head_dim)
    with pytest.raises(ValueError, match="window"):
        build([I32_MAX + 1], 2, 8)


def test_compressed_layouts() -> None:
    """prompt_cache 5.2"""
    build = PromptCacheModelIdentity.compressed_layouts
    assert list(build(2, 512, 64)) == [LayerCachePolicy.CompressedLatentRotary(FULL, 512, 64)] * 2
    not_positive = PromptCacheError.Policy(CachePolicyError.Invalid("not_positive"))
    for count, latent, rotary, error in (
        (2, 0, 64, not_positive),
        (2, 512, -1, not_positive),
        (0, 0, 64, not_positive),
        (0, 512, 64, Malformed("layout_empty")),
    ):
        with refused(error):
            build(count, latent, rotary)


def test_segments_of_a_model() -> None:
    """prompt_cache 5.2, its example"""
    assert model.state_segment("b") == MODEL["state_segments"][1]
    piece = model.select_state_segment("b")
    assert piece == msgspec.structs.replace(
        model,
        global_layer_start=24,
        global_layer_end=26,
        layer_layout=MODEL["layer_layout"][4:],
        layer_prefix_offsets=(-2, 0),
        state_segments=(PromptCacheStateSegment.new("b", range(2)),),
    )
    assert piece.select_state_segment("b") == piece
    assert model.select_state_segment("a").global_layer_end == 24
    for call in (model.state_segment, model.select_state_segment):
        with refused(Incompatible("segment_unknown")):
            call("c")
    broken = msgspec.structs.replace(model, layer_count=0)
    for call in (broken.state_segment, broken.select_state_segment):
        with refused(Incompatible("geometry")):
            call("c")


def test_a_descriptor_fits_a_model_field_by_field() -> None:
    """prompt_cache 5.4: first difference in the model's order; three fields are not compared."""
    validate_prompt_cache_model_identity(descriptor, model)
    other: dict[str, Any] = {
        "model_family": "x",
        "effective_model_type": "x",
        "architecture_fingerprint": "x",
        "layer_count": 31,
        "global_layer_start": 19,
        "global_layer_end": 25,
        "sink_tokens": 5,
        "topology": PromptCacheTopology.default(),
        "layer_layout": LayerSchedule(
            LayerCachePolicy.key_value(FULL, n, 1)
            for n in range(1, 7)  # equal sizes in bytes
        ),
        "layer_prefix_offsets": (0,) * 6,
        "state_segments": (PromptCacheStateSegment.new("a", range(6)),),
    }
    assert tuple(other) == MODEL_ORDER
    moved = {"global_layer_start": 19, "global_layer_end": 25}  # neither can differ alone
    for position, name in enumerate(MODEL_ORDER):
        later = {key: other[key] for key in MODEL_ORDER[position:]}
        changed = PromptCacheDescriptor(**{**MODEL, **OWN, **later})
        if name == "global_layer_end":
            continue
        with refused(Incompatible(f"field:{name}")):
            validate_prompt_cache_model_identity(changed, model)
        alone = moved if name in moved else {name: other[name]}
        single = PromptCacheDescriptor(**{**MODEL, **OWN, **alone})
        with refused(Incompatible(f"field:{name}")):
            validate_prompt_cache_model_identity(single, model)
    shorter: dict[str, Any] = {
        "global_layer_end": 24,
        "layer_layout": MODEL["layer_layout"][:4],
        "layer_prefix_offsets": MODEL["layer_prefix_offsets"][:4],
        "state_segments": MODEL["state_segments"][:1],
    }
    with refused(Incompatible("field:global_layer_end")):
        validate_prompt_cache_model_identity(
            descriptor, PromptCacheModelIdentity(**{**MODEL, **shorter})
        )
    for own in (
        {"checkpoint_fingerprint": "x"},
        {"prefix_content_fingerprint": "x"},
        {"batch_size": 9},
    ):
        unlike = PromptCacheDescriptor(**{**MODEL, **OWN, **own})
        validate_prompt_cache_model_identity(unlike, model)


def test_both_sides_are_validated_first() -> None:
    """prompt_cache 5.4"""
    bad_model = msgspec.structs.replace(model, layer_count=0)
    bad_descriptor = PromptCacheDescriptor(**{**MODEL, **OWN, "global_layer_end": 19})
    with refused(Incompatible("layer_range")):
        validate_prompt_cache_model_identity(bad_descriptor, bad_model)
    with refused(Incompatible("geometry")):
        validate_prompt_cache_model_identity(descriptor, bad_model)


def test_options() -> None:
    """prompt_cache 5.5"""
    assert PromptCacheOptions.new() == PromptCacheOptions()
    assert PromptCacheOptions() == PromptCacheOptions(
        application_namespace=None, replace_existing=False
    )
    made = PromptCacheOptions.new(" chat ", True)
    assert (made.application_namespace, made.replace_existing) == (" chat ", True)
    for blank in ("", " ", "\n"):
        with refused(Malformed("namespace_empty")):
            PromptCacheOptions.new(blank)
    with pytest.raises(TypeError, match="replace_existing"):
        PromptCacheOptions.new("x", 1)  # type: ignore[arg-type]
