"""The manifest's text: vectors, refusals of decoding, compatibility (prompt_cache 6, 7, 9)."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmcache.bounds import I32_MAX, I32_MIN, I64_MAX, I64_MIN, U32_MAX, U64_MAX
from shmcache.errors import CachePolicyError, PromptCacheError
from shmcache.policy.attention import AttentionPolicy
from shmcache.policy.fingerprints import prompt_cache_token_fingerprint
from shmcache.policy.identity import CacheRankIdentity
from shmcache.policy.json_text import read_json, write_json
from shmcache.policy.layer import LayerCachePolicy
from shmcache.policy.manifest import (
    PROMPT_CACHE_SCHEMA_VERSION,
    PromptCacheManifest,
    require_schema_version,
)
from shmcache.policy.payload import PayloadEnum
from shmcache.policy.state import StateTensorOwner
from shmcache.policy.state_kinds import (
    StateTensorDimension,
    StateTensorPresence,
    StateTensorRole,
)
from shmcache.policy.topology import PromptCacheTopology
from tests.policy.samples import PREFIX, descriptor_of, hybrid, manifests, minimal
from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = ROOT.parent / "shared" / "contract" / "example_manifest.json"
NAMES = (
    "schema_version model_family effective_model_type checkpoint_fingerprint "
    "prefix_content_fingerprint architecture_fingerprint layer_count global_layer_start "
    "global_layer_end block_size_tokens batch_size total_prefix_tokens prefix_sha256 layer_layout "
    "layer_prefix_offsets state_segments sink_tokens topology application_namespace blocks "
    "state_tensors"
).split()


def example() -> bytes:
    if not EXAMPLE.exists():
        pytest.skip("the contract's example manifest is not beside this checkout")
    return EXAMPLE.read_bytes()


def document() -> dict[str, Any]:
    """The hybrid manifest as plain JSON values, free to change."""
    plain: dict[str, Any] = json.loads(hybrid().to_json())
    return plain


def read(plain: Any) -> PromptCacheManifest:
    return PromptCacheManifest.from_json(json.dumps(plain))


def test_the_example_is_read_and_written_byte_for_byte() -> None:
    """prompt_cache 9"""
    text = example()
    assert len(text) == 10_537
    manifest = PromptCacheManifest.from_json(text)
    manifest.validate()
    manifest.validate_compatibility(descriptor_of(manifest), [11, 22, 33, 44, 55, 66])
    assert manifest.to_json() == text
    assert manifest.layer_layout[1].attention is not None
    assert manifest.layer_layout[1].attention.window == 3


def test_the_minimal_manifest_has_the_known_bytes() -> None:
    """prompt_cache 9: 1,604 bytes and their hash"""
    manifest = minimal()
    manifest.validate()
    text = manifest.to_json()
    assert len(text) == 1604
    digest = "ec8c95ed429004083c0bf92da937ffa7bf2f042330935df0df2d422257c32ce2"
    assert hashlib.sha256(text).hexdigest() == digest
    assert PromptCacheManifest.from_json(text) == manifest


def test_any_layout_of_the_text_is_read() -> None:
    """prompt_cache 9: writers indent, readers do not care; nor about the order of keys."""
    manifest = hybrid()
    text = manifest.to_json()
    assert text.decode() == json.dumps(document(), indent=2, ensure_ascii=False) + "\n"
    compact = json.dumps(document(), separators=(",", ":")).encode()
    shuffled = json.dumps(dict(reversed(document().items())), indent="\t")
    for form in (text, compact, compact.decode(), shuffled, b" \n" + text + b"\t "):
        assert PromptCacheManifest.from_json(form) == manifest
        assert PromptCacheManifest.from_json(form).to_json() == text
    assert "grüße".encode() in text


def test_keys_in_order() -> None:
    """prompt_cache 6.1 to 6.3: 21, 14 and 8 keys"""
    plain = document()
    assert PROMPT_CACHE_SCHEMA_VERSION == plain["schema_version"] == 8
    assert list(plain) == NAMES
    assert len(NAMES) == 21
    assert " ".join(plain["blocks"][0]) == (
        "global_layer representation start end rank shard first_array second_array first_shape "
        "second_shape first_dtype second_dtype logical_bytes payload_sha256"
    )
    assert " ".join(plain["state_tensors"][0]) == (
        "owner role shard array shape dtype logical_bytes payload_sha256"
    )


def test_optional_keys_read_as_none_and_are_written() -> None:
    """policy 1.3"""
    plain = document()
    plain["topology"] = {"addressable_state_replicated": True}
    del plain["application_namespace"]
    for block in plain["blocks"]:
        del block["rank"]
    manifest = read(plain)
    manifest.validate()
    assert manifest.application_namespace is None
    assert manifest.topology == PromptCacheTopology.default()
    written = json.loads(manifest.to_json())
    assert written["application_namespace"] is None
    assert written["blocks"][0]["rank"] is None
    assert written["topology"]["stage"] is None


OPTIONAL = {"application_namespace", "rank", "stage", "shard", "addressable"}
OPTIONAL |= {"stage_rank", "shard_rank", "addressable_rank"}


def objects(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every object in a JSON value."""
    if isinstance(plain, dict):
        yield path
    if isinstance(plain, dict | list):
        for key in plain if isinstance(plain, dict) else range(len(plain)):
            yield from objects(plain[key], (*path, key))


def at(plain: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        plain = plain[key]
    return plain


def test_a_missing_key_is_a_decode_failure_unless_optional() -> None:
    """prompt_cache 7.2: in every object of the text"""
    whole = document()
    for path in objects(whole):
        for key in at(whole, path):
            plain = copy.deepcopy(whole)
            del at(plain, path)[key]
            is_optional = key in OPTIONAL and ("topology" in path or key != "shard")
            if is_optional:
                read(plain)
            else:
                with pytest.raises(msgspec.ValidationError):
                    read(plain)


def test_unknown_keys_are_ignored_but_in_a_range_and_beside_a_tag() -> None:
    """policy 1.3, prompt_cache 4"""
    families: list[type[PayloadEnum]] = [
        AttentionPolicy,
        LayerCachePolicy,
        StateTensorRole,
        StateTensorDimension,
    ]
    families += [StateTensorPresence, StateTensorOwner]
    tags = {tag for family in families for tag in family.variants}
    whole = document()
    ranges = 0
    for path in objects(whole):
        plain = copy.deepcopy(whole)
        at(plain, path)["distributed_commit"] = {"any": [None, 1.5, "x"]}
        is_enum = len(at(whole, path)) == 1 and set(at(whole, path)) <= tags
        is_range = set(at(whole, path)) == {"start", "end"}
        ranges += is_range
        if is_enum or is_range:
            with pytest.raises(msgspec.ValidationError):
                read(plain)
        else:
            assert read(plain) == hybrid()
    assert ranges == 2


DOMAINS = {
    "schema_version": (0, U32_MAX),
    "block_size_tokens": (I32_MIN, I32_MAX),
    **dict.fromkeys(
        "layer_count global_layer_start global_layer_end batch_size total_prefix_tokens "
        "sink_tokens".split(),
        (0, U64_MAX),
    ),
}
BLOCK_DOMAINS = {
    "global_layer": (0, U64_MAX),
    "start": (I64_MIN, I64_MAX),
    "end": (I64_MIN, I64_MAX),
    "logical_bytes": (0, U64_MAX),
}


def test_numbers_decode_within_their_domain() -> None:
    """prompt_cache 7.2: beyond it is a decode failure, no PromptCacheError."""
    whole = document()
    places: list[tuple[tuple[Any, ...], tuple[int, int]]]
    places = [((name,), bounds) for name, bounds in DOMAINS.items()]
    places += [(("blocks", 1, name), bounds) for name, bounds in BLOCK_DOMAINS.items()]
    places += [
        (("layer_prefix_offsets", 2), (I32_MIN, I32_MAX)),
        (("blocks", 0, "first_shape", 3), (I32_MIN, I32_MAX)),
        (("blocks", 0, "rank", "stage_rank"), (0, U64_MAX)),
        (("state_tensors", 0, "shape", 0), (I32_MIN, I32_MAX)),
        (("state_tensors", 0, "logical_bytes"), (0, U64_MAX)),
        (("state_tensors", 0, "owner", "layer"), (0, U64_MAX)),
        (("state_tensors", 0, "role", "convolution", "slot"), (0, U32_MAX)),
        (("topology", "stage", 0), (0, U64_MAX)),
        (("state_segments", 0, "layers", "end"), (0, U64_MAX)),
        (("layer_layout", 0, "key_value", "head_dim"), (1, U32_MAX)),
        (("layer_layout", 1, "key_value", "attention", "sliding", "window"), (1, U32_MAX)),
    ]
    for (*path, last), (low, high) in places:
        plain = copy.deepcopy(whole)
        holder = at(plain, tuple(path))
        for inside in (low, high):
            holder[last] = inside
            assert at(json.loads(read(plain).to_json()), (*path, last)) == inside
        for outside in (low - 1, high + 1, 1 << 70, 1.0, True, str(low), None, [low]):
            holder[last] = outside
            if outside is None and last == "stage_rank":
                continue
            with pytest.raises(msgspec.ValidationError):
                read(plain)


def test_decode_or_validate() -> None:
    """prompt_cache 7.2: a rank outside its axis decodes and fails then; head count 0 does not."""
    plain = document()
    plain["topology"]["stage"] = [2, 2]
    manifest = read(plain)
    with pytest.raises(PromptCacheError) as caught:
        manifest.validate()
    assert caught.value == PromptCacheError.Malformed("topology_stage")
    plain = document()
    plain["layer_layout"][0]["key_value"]["num_key_value_heads"] = 0
    with pytest.raises(msgspec.ValidationError):
        read(plain)
    for wrong in ([], "x", None, 3, [document()]):
        with pytest.raises(msgspec.ValidationError):
            read(wrong)


def test_hostile_text_is_refused() -> None:
    """DESIGN 9: duplicate keys, NaN, deep nesting; cut and spoiled text."""
    text = hybrid().to_json()
    for position in objects(document()):
        key = next(iter(at(document(), position)))
        plain = copy.deepcopy(document())
        at(plain, position)["duplicate"] = 1
        repeated = json.dumps(plain).replace('"duplicate"', json.dumps(key))
        with pytest.raises(msgspec.ValidationError, match="duplicate key"):
            PromptCacheManifest.from_json(repeated)
    escaped = text.replace(b'"blocks"', b'"blocks": [], "\\u0062locks"')
    with pytest.raises(msgspec.DecodeError, match="duplicate key 'blocks'"):
        PromptCacheManifest.from_json(escaped)
    deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"," + text[1:]
    with pytest.raises(msgspec.DecodeError, match="nested"):
        PromptCacheManifest.from_json(deep)
    for token in (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"9" * 5000):
        for name in (b'"sink_tokens": 0', b'"application_namespace": "tests"'):
            assert name in text
            spoiled = text.replace(name, name.split(b":")[0] + b": " + token)
            with pytest.raises(msgspec.DecodeError):
                PromptCacheManifest.from_json(spoiled)
        unknown = b'{"x": ' + token + b", " + text[1:]
        with pytest.raises(msgspec.DecodeError):
            PromptCacheManifest.from_json(unknown)
    for cut in range(0, len(text) - 2, 97):
        with pytest.raises(msgspec.DecodeError):
            PromptCacheManifest.from_json(text[:cut])
    for other in (
        b"\xef\xbb\xbf" + text,
        text + b"{}",
        text + b"x",
        text.decode().encode("utf-16"),
    ):
        with pytest.raises(msgspec.DecodeError):
            PromptCacheManifest.from_json(other)


@settings(max_examples=300)
@given(st.data())
def test_damage_is_refused_or_changes_the_value(data: st.DataObject) -> None:
    """Bytes cut out, put in or replaced: a typed refusal, or a manifest like any other."""
    text = hybrid().to_json()
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.integers(0, 8)))
    piece = data.draw(st.sampled_from([b"", b"{", b"]", b'"', b"0", b"null", b",", b"\\", b"\xff"]))
    damaged = text[:start] + piece + text[end:]
    try:
        manifest = PromptCacheManifest.from_json(damaged)
    except msgspec.DecodeError:
        return
    assert PromptCacheManifest.from_json(manifest.to_json()) == manifest
    try:
        manifest.validate()
    except PromptCacheError:
        return


@given(manifests)
def test_round_trip_of_any_manifest(manifest: PromptCacheManifest) -> None:
    """Through the written text, with extreme values; the text is that of an indenting dump."""
    text = manifest.to_json()
    assert PromptCacheManifest.from_json(text) == manifest
    assert text.decode() == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"


@settings(max_examples=50)
@given(manifests)
def test_validation_of_any_manifest_ends_in_a_typed_error(manifest: PromptCacheManifest) -> None:
    """Extreme numbers overflow nothing."""
    with pytest.raises(PromptCacheError):
        manifest.validate()


def test_the_schema_is_checked_before_the_shape() -> None:
    """persistence 4.1, steps 4 and 5"""
    require_schema_version(read_json(hybrid().to_json()))
    require_schema_version({"schema_version": 8})
    for version in (0, 7, 9, U32_MAX):
        with pytest.raises(PromptCacheError) as caught:
            require_schema_version({"schema_version": version})
        assert caught.value == PromptCacheError.UnsupportedSchema(version)
    missing: list[Any] = [{}, [], [["schema_version", 8]], "schema_version", None, 8]
    odd = [{"schema_version": one} for one in (True, 8.0, "8", None, -1, U32_MAX + 1, [8])]
    for plain in missing + odd:
        with pytest.raises(PromptCacheError) as caught:
            require_schema_version(plain)
        assert caught.value == PromptCacheError.Malformed("schema_version_field")


def test_a_document_is_decoded_without_change() -> None:
    plain = read_json(hybrid().to_json())
    before = write_json(plain)
    assert PromptCacheManifest.from_document(plain) == hybrid()
    assert write_json(plain) == before


def refused(expected: PromptCacheError) -> Any:
    return pytest.raises(PromptCacheError, check=lambda error: error == expected)


def test_compatibility_with_tokens() -> None:
    """prompt_cache 7.7 and 8: the whole prefix or nothing"""
    manifest = hybrid()
    expected = descriptor_of(manifest)
    manifest.validate_compatibility(expected, PREFIX)
    manifest.validate_compatibility(expected, iter(PREFIX))
    swapped = (PREFIX[1], PREFIX[0], *PREFIX[2:])
    for tokens in (swapped, PREFIX[:5], (*PREFIX, 2), ()):
        with refused(PromptCacheError.PrefixIdentityMismatch()):
            manifest.validate_compatibility(expected, tokens)
    with pytest.raises(ValueError, match="token id"):
        manifest.validate_compatibility(expected, [-1])
    for tokens in (PREFIX, PREFIX[:5]):  # a hash of five tokens, and six that the blocks hold
        forged = msgspec.structs.replace(
            manifest, prefix_sha256=prompt_cache_token_fingerprint(PREFIX[:5])
        )
        with refused(PromptCacheError.PrefixIdentityMismatch()):
            forged.validate_compatibility(expected, tokens)


def test_compatibility_field_by_field() -> None:
    """prompt_cache 7.7: the first difference in this order; before the tokens are looked at"""
    manifest = hybrid()
    base = descriptor_of(manifest)
    layout, segments = manifest.layer_layout, manifest.state_segments
    other: dict[str, Any] = {
        "model_family": "x",
        "effective_model_type": "x",
        "checkpoint_fingerprint": "x",
        "prefix_content_fingerprint": "x",
        "architecture_fingerprint": "x",
        "layer_count": 11,
        "global_layer_start": 4,
        "global_layer_end": 9,
        "batch_size": 2,
        "layer_layout": type(layout)([layout[1], *layout[1:]]),
        "layer_prefix_offsets": (0, 0, 0, 0, 0),
        "state_segments": (segments[0], msgspec.structs.replace(segments[1], id="x")),
        "sink_tokens": 1,
        "topology": PromptCacheTopology.default(),
    }
    assert list(other) == list(base.__struct_fields__)
    for position, name in enumerate(other):
        later = {key: other[key] for key in list(other)[position:]}
        if name == "global_layer_end":
            later |= {
                "global_layer_start": 5,
                "layer_layout": layout[:4],
                "layer_prefix_offsets": (0,) * 4,
                "state_segments": segments[:1],
            }
        with refused(PromptCacheError.Incompatible(f"field:{name}")):
            manifest.validate_compatibility(msgspec.structs.replace(base, **later), ())
    for own in ({"application_namespace": None}, {"block_size_tokens": 3}):
        changed = msgspec.structs.replace(manifest, **own)
        changed.validate_compatibility(base, PREFIX)


def test_both_sides_are_validated_before_they_are_compared() -> None:
    """prompt_cache 7.7 and 8"""
    manifest = hybrid()
    leading = msgspec.structs.replace(
        descriptor_of(manifest), layer_prefix_offsets=(1, 0, 0, 0, -1)
    )
    with refused(PromptCacheError.Incompatible("geometry")):
        manifest.validate_compatibility(leading, PREFIX)
    old = msgspec.structs.replace(manifest, schema_version=7)
    with refused(PromptCacheError.UnsupportedSchema(7)):
        old.validate_compatibility(leading, PREFIX)
    with refused(PromptCacheError.Policy(CachePolicyError.Invalid("no_state_tensors"))):
        empty = msgspec.structs.replace(manifest.layer_layout[4], tensors=())
        layout = type(manifest.layer_layout)([*manifest.layer_layout[:4], empty])
        expected = msgspec.structs.replace(descriptor_of(manifest), layer_layout=layout)
        manifest.validate_compatibility(expected, PREFIX)


def test_layouts_of_equal_size_do_not_fit() -> None:
    """Heads by width swapped: the same bytes, another meaning."""
    manifest = hybrid()
    layout = manifest.layer_layout
    swapped = msgspec.structs.replace(layout[0], num_key_value_heads=8, head_dim=2)
    other = msgspec.structs.replace(
        descriptor_of(manifest), layer_layout=type(layout)([swapped, *layout[1:]])
    )
    with refused(PromptCacheError.Incompatible("field:layer_layout")):
        manifest.validate_compatibility(other, PREFIX)
    ranked = msgspec.structs.replace(manifest.blocks[0], rank=CacheRankIdentity(stage_rank=0))
    with refused(PromptCacheError.Malformed("block_rank")):
        msgspec.structs.replace(manifest, blocks=(ranked, *manifest.blocks[1:])).validate()
