"""The JSON form of payload enums: external tags, by position, refused when odd (policy 1.3)."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.policy.attention import AttentionPolicy, LayerSchedule
from shmcache.policy.layer import AnyLayerCachePolicy, LayerCachePolicy
from shmcache.policy.payload import PayloadEnum
from shmcache.policy.state import StateComponentRole, StateTensorOwner, StateTensorPolicy
from shmcache.policy.state_kinds import (
    PoolingStateComponent,
    StateTensorDimension,
    StateTensorPresence,
    StateTensorRole,
)
from shmcache.policy.wire import dec_hook, enc_hook, from_wire, to_wire
from tests.policy import samples

FORMS: tuple[tuple[PayloadEnum, Any], ...] = (
    (AttentionPolicy.Full(), "full"),
    (AttentionPolicy.Sliding(8), {"sliding": {"window": 8}}),
    (StateTensorRole.Convolution(0), {"convolution": {"slot": 0}}),
    (StateTensorRole.Recurrent(), "recurrent"),
    (StateTensorRole.PrefixEmbedding(), "prefix_embedding"),
    (StateTensorRole.PositionDelta(), "position_delta"),
    (
        StateTensorRole.Pooling(1, PoolingStateComponent.POOLED),
        {"pooling": {"stream": 1, "component": "pooled"}},
    ),
    (StateTensorDimension.Batch(), "batch"),
    (StateTensorDimension.PrefixTokens(), "prefix_tokens"),
    (StateTensorDimension.PrefixTokensDiv(4), {"prefix_tokens_div": 4}),
    (StateTensorDimension.PrefixTokensRem(4), {"prefix_tokens_rem": 4}),
    (StateTensorDimension.Fixed(16), {"fixed": 16}),
    (StateTensorDimension.Scalar(), "scalar"),
    (StateTensorPresence.Required(), "required"),
    (StateTensorPresence.Optional(), "optional"),
    (StateTensorPresence.PrefixRemainderNonZero(4), {"prefix_remainder_non_zero": 4}),
    (StateTensorPresence.PrefixAtLeast(4), {"prefix_at_least": 4}),
    (StateTensorOwner.Layer(9), {"layer": 9}),
    (StateComponentRole.AttentionKeys(), "attention_keys"),
    (StateComponentRole.AttentionValues(), "attention_values"),
    (StateComponentRole.CompressedLatent(), "compressed_latent"),
    (StateComponentRole.RotaryKeys(), "rotary_keys"),
    (StateComponentRole.Fixed(StateTensorRole.Recurrent()), {"fixed": "recurrent"}),
    (
        StateComponentRole.Fixed(StateTensorRole.Convolution(0)),
        {"fixed": {"convolution": {"slot": 0}}},
    ),
    (LayerCachePolicy.NoState(), "no_state"),
    (
        LayerCachePolicy.KeyValue(AttentionPolicy.Sliding(2), 3, 4),
        {
            "key_value": {
                "attention": {"sliding": {"window": 2}},
                "num_key_value_heads": 3,
                "head_dim": 4,
            }
        },
    ),
    (
        LayerCachePolicy.CompressedLatentRotary(AttentionPolicy.Full(), 3, 4),
        {"compressed_latent_rotary": {"attention": "full", "latent_dim": 3, "rotary_dim": 4}},
    ),
    (LayerCachePolicy.FixedState(()), {"fixed_state": {"tensors": []}}),
)


def test_forms_of_the_tables() -> None:
    """policy 1.3, 2.1, 4, 7"""
    for value, plain in FORMS:
        assert to_wire(value) == plain
        assert from_wire(value.family(), plain) == value
        assert from_wire(type(value), plain) == value


def test_every_variant_is_in_the_table_or_made_like_one_that_is() -> None:
    families = {value.family(): value for value, _ in FORMS}
    for family in families:
        known = {type(value) for value, _ in FORMS}
        missing = set(family.variants.values()) - known
        # Field names, the only thing a form is made of, are checked with the other examples.
        assert all(variant.__struct_fields__[0] in ("attention", "value") for variant in missing)


def test_odd_forms_are_refused() -> None:
    """policy 1.3: unknown tag, two keys, none, a payload too many, too few, of another shape."""
    for value, plain in FORMS:
        family = value.family()
        tag = plain if isinstance(plain, str) else next(iter(plain))
        payload = {} if isinstance(plain, str) else plain[tag]
        odd: list[Any] = [
            "unknown",
            tag.upper(),
            {"unknown": payload},
            {},
            {tag: payload, "other": 1},
            {"kind": tag},
            [tag],
            [],
            None,
            1,
            True,
            {tag: None},
            {tag: []},
        ]
        if isinstance(plain, str):
            odd += [{tag: {}}, {tag: 1}]
        else:
            odd += [tag, {tag: "x"}, {tag: True}, {tag: -1}, {tag: 1.0}, {tag: "1"}]
        if isinstance(payload, dict) and payload and not isinstance(plain, str):
            odd += [{tag: {}}, *({tag: {**payload, name: None}} for name in payload)]
        for form in odd:
            with pytest.raises(msgspec.ValidationError):
                from_wire(family, form)


def test_a_stray_key_named_kind_changes_nothing() -> None:
    """policy 1.3: the tag wins, unknown keys are ignored."""
    plain = {"sliding": {"kind": "full", "window": 8, "colour": "red"}}
    assert from_wire(AttentionPolicy, plain) == AttentionPolicy.Sliding(8)
    layer: Any = {
        "key_value": {
            "kind": "no_state",
            "attention": "full",
            "num_key_value_heads": 1,
            "head_dim": 1,
        }
    }
    expected = LayerCachePolicy.KeyValue(AttentionPolicy.Full(), 1, 1)
    assert from_wire(LayerCachePolicy, layer) == expected


def test_the_position_decides_not_the_key() -> None:
    """policy 1.3: a tag of one enum is none in the place of another."""
    tags = {value.family(): plain for value, plain in FORMS if isinstance(plain, str)}
    for family, (other, plain) in itertools.product(tags, tags.items()):
        if plain not in family.variants:
            with pytest.raises(msgspec.ValidationError, match="has no variant"):
                from_wire(family, plain)
        assert plain in other.variants
    tensor = to_wire(samples.hybrid_layers()[4].fixed_state()[0])
    for name, wrong in (("role", "batch"), ("presence", "recurrent"), ("shape", "batch")):
        with pytest.raises(msgspec.ValidationError):
            from_wire(StateTensorPolicy, {**tensor, name: wrong})


def test_unknown_tags_of_later_versions_are_refused() -> None:
    """policy 9"""
    for tag in ("auxiliary", "integer_history"):
        with pytest.raises(msgspec.ValidationError, match=f"no variant '{tag}'"):
            from_wire(StateTensorRole, tag)


def test_a_schedule_is_a_bare_array() -> None:
    """policy 2.2: without wrapper; decoding does not ask for a layer."""
    full = AttentionPolicy.Full()
    kind: Any = LayerSchedule[AnyLayerCachePolicy]
    encoded = msgspec.json.encode(LayerSchedule([full]), enc_hook=enc_hook)
    assert encoded == b'[{"kind":"full"}]'
    decode = msgspec.json.Decoder(kind, dec_hook=dec_hook).decode
    assert decode(b"[]").is_empty()
    assert decode(b'[{"kind":"no_state"}]') == LayerSchedule([LayerCachePolicy.NoState()])
    for text in (b"{}", b'"x"', b"[3]", b'[{"kind":"full"}]'):
        with pytest.raises(msgspec.ValidationError):
            decode(text)
    with pytest.raises(NotImplementedError):
        enc_hook(object())
    with pytest.raises(NotImplementedError):
        dec_hook(int, 3)


serialisable = st.one_of(
    samples.attentions,
    samples.roles,
    samples.dimensions,
    samples.presences,
    samples.owners,
    samples.component_roles,
    samples.tensor_policies,
    samples.component_policies,
    samples.layers,
    samples.ranks,
    samples.block_ids,
    samples.topologies,
    samples.segments,
    samples.blocks,
    samples.state_tensors,
    samples.manifests,
)


@given(serialisable)
def test_round_trips_in_the_external_form(value: Any) -> None:
    """Through real JSON text, with extreme values."""
    text = msgspec.json.encode(to_wire(value))
    assert from_wire(type(value), msgspec.json.decode(text)) == value


@given(serialisable)
def test_round_trips_in_msgspecs_own_form(value: Any) -> None:
    """policy 1.3: fine between worker processes; JSON, msgpack and pickle."""
    kind: Any = value.union if isinstance(value, PayloadEnum) else type(value)
    for codec in (msgspec.json, msgspec.msgpack):
        text = codec.encode(value, enc_hook=enc_hook)
        twin = codec.decode(text, type=kind, dec_hook=dec_hook)
        assert twin == value
        assert hash(twin) == hash(value)
    for twin in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert twin == value


def spoil(plain: Any, noise: Any, data: st.DataObject) -> Any:
    """`plain` with noise in the place of something in it."""
    if not isinstance(plain, dict | list) or not plain or data.draw(st.booleans()):
        return noise
    key = data.draw(st.sampled_from(list(plain if isinstance(plain, dict) else range(len(plain)))))
    spoiled = dict(plain) if isinstance(plain, dict) else list(plain)
    spoiled[key] = spoil(plain[key], noise, data)
    return spoiled


@given(st.none() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({}), st.data())
def test_noise_in_any_position_is_refused_or_a_value(noise: Any, data: st.DataObject) -> None:
    value = data.draw(samples.layers | samples.state_tensors | samples.component_policies)
    spoiled = spoil(to_wire(value), noise, data)
    try:
        read = from_wire(type(value), spoiled)
    except msgspec.ValidationError:
        return
    assert from_wire(type(value), to_wire(read)) == read
