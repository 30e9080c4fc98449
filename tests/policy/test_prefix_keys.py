"""Prefix keys against the words of the page, and what must never share one (C17)."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import BLOCK_TOKENS_MAX, U32_MAX, U64_MAX
from shmcache.policy.attention import AttentionPolicy, LayerSchedule
from shmcache.policy.identity import CacheRankIdentity
from shmcache.policy.layer import LayerCachePolicy
from shmcache.policy.prefix_keys import PrefixKeys
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.policy.topology import LayerRange, PromptCacheStateSegment, PromptCacheTopology
from shmcache.policy.wire import to_wire
from tests.policy.samples import texts, u32s, u64s
from tests.support import ROOT

names = texts.filter(str.strip)
ranks = st.none() | st.builds(
    CacheRankIdentity,
    stage_rank=st.none() | u64s,
    shard_rank=st.none() | u64s,
    addressable_rank=st.none() | u64s,
)
fields = st.fixed_dictionaries(
    {
        "identity": names,
        "checkpoint_fingerprint": names,
        "dtype": names,
        "layout": names,
        "salt": st.binary(max_size=5),
        "block_tokens": st.integers(1, 40),
        "group": u64s,
        "rank": ranks,
    }
)


def keys(**changed: Any) -> PrefixKeys:
    """The keys of a sample, some of its fields changed."""
    return PrefixKeys(
        **{
            "identity": "demo",
            "checkpoint_fingerprint": "weights-1",
            "dtype": "bfloat16",
            "layout": "layer,kv,head,token,dim",
            "block_tokens": 4,
            **changed,
        }
    )


def model(heads: int = 2, head_dim: int = 8, layers: int = 3) -> PromptCacheModelIdentity:
    """A model whose blocks have 2 x heads x head_dim numbers per token and layer."""
    layout = PromptCacheModelIdentity.key_value_layouts([None] * layers, heads, head_dim)
    return PromptCacheModelIdentity.new(
        model_family="llama",
        effective_model_type="llama",
        architecture_fingerprint="größe",
        layer_count=layers,
        global_layer_start=0,
        global_layer_end=layers,
        sink_tokens=0,
        topology=PromptCacheTopology.default(),
        layer_layout=layout,
        layer_prefix_offsets=[0] * layers,
        state_segments=[
            PromptCacheStateSegment(id="decoder", layers=LayerRange(start=0, end=layers))
        ],
    )


def reference(tokens: list[int], identity: Any, **other: Any) -> list[bytes]:
    """The page's words, one after the other, with nothing of the package but the JSON form."""

    def word(number: int) -> bytes:
        return struct.pack("<Q", number)

    kind, name = b"text", identity
    if not isinstance(identity, str):
        kind = b"model"
        name = json.dumps(to_wire(identity), sort_keys=True, separators=(",", ":"))
    rank = b""
    if (given := other["rank"]) is not None:
        for axis in (given.stage_rank, given.shard_rank, given.addressable_rank):
            rank += b"\x00" if axis is None else b"\x01" + word(axis)
    stream = b""
    for component in (
        b"shmcache-prefix-keys-v1",
        kind,
        name.encode(),
        other["checkpoint_fingerprint"].encode(),
        other["dtype"].encode(),
        other["layout"].encode(),
        other["salt"],
        word(other["block_tokens"]),
        word(other["group"]),
        rank,
    ):
        stream += word(len(component)) + component
    found = [hashlib.sha256(stream).digest()]
    size = other["block_tokens"]
    for start in range(0, len(tokens) // size * size, size):
        block = struct.pack(f"<{size}I", *tokens[start : start + size])
        found.append(hashlib.sha256(found[-1] + block).digest())
    return found


# ---- what a key is -----------------------------------------------------------------------------


@given(fields, st.lists(u32s, max_size=100))
def test_keys_are_what_the_page_says(given: dict[str, Any], tokens: list[int]) -> None:
    made = PrefixKeys(**given)
    expected = reference(tokens, **given)
    assert made.root == expected[0]
    assert [bytes(key) for key in made.chain(tokens)] == expected[1:]


def test_a_models_identity_is_hashed_in_the_json_form() -> None:
    found = keys(identity=model())
    other: dict[str, Any] = {"salt": b"", "block_tokens": 4, "group": 0, "rank": None}
    strings = {
        "checkpoint_fingerprint": "weights-1",
        "dtype": "bfloat16",
        "layout": "layer,kv,head,token,dim",
    }
    expected = reference([1, 2, 3, 4], model(), **strings, **other)
    assert [found.root, *map(bytes, found.chain([1, 2, 3, 4]))] == expected
    # A vector: a field more in the identity would be another version of the keys.
    assert found.root.hex() == "5d8e72cef4486bcd5e03eafe2c05ceaaff0fd8c1f39e6c46f3b2526c70f50a8d"
    assert keys(identity=json.dumps(to_wire(model()))) != found


def test_the_result_is_an_array_of_keys() -> None:
    found = keys().chain(range(10))
    assert (found.shape, found.dtype.name, found.flags.c_contiguous) == ((2, 32), "uint8", True)
    assert not found.flags.writeable
    for few in ([], [1, 2, 3], np.array([], np.uint32), np.array([], np.int64)):
        assert keys().chain(few).shape == (0, 32)


def test_another_process_has_the_same_keys() -> None:
    """Whatever the seed of its string hashes."""
    code = (
        "from tests.policy.test_prefix_keys import keys, model\n"
        "print(keys(identity=model(), salt='x').chain(range(64)).tobytes().hex())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert answers == {keys(identity=model(), salt="x").chain(range(64)).tobytes().hex()}


# ---- prefixes ----------------------------------------------------------------------------------


@given(fields, st.lists(u32s, max_size=120), st.data())
def test_a_prefix_has_the_first_keys(
    given: dict[str, Any], tokens: list[int], data: st.DataObject
) -> None:
    made = PrefixKeys(**given)
    whole = made.chain(tokens)
    assert len(whole) == len(tokens) // made.block_tokens
    cut = data.draw(st.integers(0, len(tokens)))
    head = made.chain(tokens[:cut])
    assert (head == whole[: len(head)]).all()
    assert len(head) == cut // made.block_tokens


@given(fields, st.lists(u32s, max_size=120), st.data())
def test_a_session_goes_on_block_by_block(
    given: dict[str, Any], tokens: list[int], data: st.DataObject
) -> None:
    """Any cut at a block's end gives the same keys as all at once."""
    made = PrefixKeys(**given)
    whole = made.chain(tokens)
    cut = data.draw(st.integers(0, len(whole)))
    parent = whole[cut - 1] if cut else None
    rest = made.chain(np.array(tokens[cut * made.block_tokens :], np.uint32), parent)
    assert (rest == whole[cut:]).all()
    if cut:
        assert (made.chain(tokens[cut * made.block_tokens :], bytes(whole[cut - 1])) == rest).all()


@given(st.lists(u32s, min_size=8, max_size=40), st.data())
def test_one_other_token_changes_its_block_and_all_after_it(
    tokens: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    other = tokens.copy()
    other[place] ^= data.draw(st.integers(1, U32_MAX))
    same = (keys().chain(tokens) == keys().chain(other)).all(axis=1)
    assert same.tolist() == [block < place // 4 for block in range(len(tokens) // 4)]


def test_the_same_block_elsewhere_has_another_key() -> None:
    """A key names a whole prefix: equal tokens behind others, or at another place, are no hit."""
    found = keys().chain([7, 7, 7, 7] * 5)
    assert len({bytes(key) for key in found} | {keys().root}) == 6


# ---- what must not meet ------------------------------------------------------------------------

OTHERS: tuple[dict[str, Any], ...] = (
    {"identity": "demo2"},
    {"checkpoint_fingerprint": "weights-2"},
    {"dtype": "float16"},  # as many bytes as bfloat16
    {"layout": "layer,kv,token,head,dim"},  # a permutation
    {"salt": "tenant-a"},
    {"salt": "tenant-b"},
    {"salt": b"\0"},
    {"block_tokens": 2},
    {"group": 1},
    {"group": 256},
    {"rank": CacheRankIdentity()},
    {"rank": CacheRankIdentity(stage_rank=0)},
    {"rank": CacheRankIdentity(shard_rank=0)},
    {"rank": CacheRankIdentity(addressable_rank=0)},
    {"rank": CacheRankIdentity(stage_rank=0, shard_rank=0)},
    {"rank": CacheRankIdentity(stage_rank=1)},
    {"rank": CacheRankIdentity(stage_rank=256)},
    # The same letters, cut elsewhere.
    {"identity": "demow", "checkpoint_fingerprint": "eights-1"},
    {"checkpoint_fingerprint": "weights-1b", "dtype": "float16"},
    {"dtype": "bfloat16l", "layout": "ayer,kv,head,token,dim"},
)


def test_a_difference_in_any_field_is_a_difference_in_every_key() -> None:
    """C17: right bytes, wrong meaning, is a miss."""
    families = [keys(), *(keys(**other) for other in OTHERS)]
    found = [bytes(key) for family in families for key in family.chain([1] * 8)]
    assert len(set(found)) == len(found)
    assert len({family.root for family in families} | set(found)) == len(families) + len(found)
    assert len(set(families)) == len(families)


@given(fields, fields)
def test_keys_are_equal_only_for_equal_fields(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert (PrefixKeys(**one) == PrefixKeys(**two)) == (one == two)
    assert PrefixKeys(**one) == PrefixKeys(**one)
    assert hash(PrefixKeys(**one)) == hash(PrefixKeys(**one))


@given(fields, st.data())
def test_one_other_field_is_enough(given: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(given)))
    other = {**given, name: data.draw(fields)[name]}
    tokens = list(range(120))
    shared = set(map(bytes, PrefixKeys(**given).chain(tokens)))
    met = shared & set(map(bytes, PrefixKeys(**other).chain(tokens)))
    assert met == (shared if given[name] == other[name] else set())


def test_layouts_of_equal_size_do_not_meet() -> None:
    """C17: heads and width swapped, keys only against keys and values of half the width."""
    base = model(heads=2, head_dim=8)
    keys_only = LayerCachePolicy.key_only(AttentionPolicy.Full(), 2, 16)
    halved = msgspec.structs.replace(base, layer_layout=LayerSchedule([keys_only] * 3))
    others = (
        model(heads=8, head_dim=2),
        halved,
        model(layers=2),
        msgspec.structs.replace(base, architecture_fingerprint="other"),
        msgspec.structs.replace(
            base,
            topology=PromptCacheTopology.new(None, (2, 0), None, False),
        ),
        msgspec.structs.replace(
            base,
            topology=PromptCacheTopology.new(None, (2, 1), None, False),
        ),
    )
    assert len({keys(identity=identity) for identity in (base, *others)}) == 1 + len(others)
    assert keys(identity=model()) == keys(identity=model())


# ---- domains -----------------------------------------------------------------------------------


class Token(IntEnum):
    ONE = 1


def test_tokens_of_any_integer_type_are_the_same_tokens() -> None:
    tokens = [1, 2, 3, 4, 250, 0, 7, 9]
    expected = keys().chain(tokens)
    forms: list[Any] = [tuple(tokens), iter(tokens), [Token.ONE, *tokens[1:]]]
    for name in ("u1", "<u2", ">u2", "<u4", ">u4", "<u8", ">u8", "i2", "<i4", ">i4", "<i8", ">i8"):
        forms.append(np.array(tokens, name))
    forms.append(np.array([tokens, tokens], np.uint32).T[:, 0])  # a stride
    forms.append(np.array(tokens[::-1], np.uint32)[::-1])
    for form in forms:
        assert (keys().chain(form) == expected).all(), form
    top = [U32_MAX] * 4
    assert (keys().chain(np.array(top, np.int64)) == keys().chain(top)).all()


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        ([1, -1], ValueError, "a token id must be between 0 and 4294967295, not -1"),
        ([U32_MAX + 1], ValueError, "not 4294967296"),
        ([1, True], TypeError, "a token id must be an int, not bool"),
        ([1.0], TypeError, "not float"),
        ("1234", TypeError, "not str"),
        (np.array([1, -1]), ValueError, "a token id must be between 0 and 4294967295, not -1"),
        (np.array([-1], np.int8), ValueError, "not -1"),
        (np.array([0, 1 << 32], np.uint64), ValueError, "not 4294967296"),
        (np.array([1.0]), TypeError, "an integer type, not float64"),
        (np.array([True]), TypeError, "not bool"),
        (np.array([[1, 2, 3, 4]]), ValueError, "one dimension, not 2"),
        (np.array(3), ValueError, "one dimension, not 0"),
        (3, TypeError, "not iterable"),
    ],
)
def test_what_is_no_token(tokens: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        keys().chain(tokens)


@pytest.mark.parametrize(
    ("parent", "error"),
    [
        (b"", ValueError),
        (bytes(31), ValueError),
        (np.zeros((2, 32), np.uint8), ValueError),
        (np.zeros(8, np.uint32), TypeError),
        ("0" * 32, TypeError),
        (0, TypeError),
        ([0] * 32, TypeError),
    ],
)
def test_what_is_no_parent(parent: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="parent"):
        keys().chain([1, 2, 3, 4], parent=parent)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"identity": 3}, TypeError, "identity must be a str or a PromptCacheModelIdentity"),
        ({"identity": " "}, ValueError, "identity must not be blank"),
        ({"checkpoint_fingerprint": ""}, ValueError, "checkpoint_fingerprint must not be blank"),
        ({"dtype": ""}, ValueError, "dtype must not be blank"),
        ({"dtype": np.dtype("f4")}, TypeError, "dtype must be a str"),
        ({"layout": None}, TypeError, "layout must be a str"),
        ({"layout": "\ud800"}, ValueError, "surrogate"),
        ({"salt": 7}, TypeError, "salt must be a str"),
        ({"block_tokens": 0}, ValueError, "block_tokens"),
        ({"block_tokens": BLOCK_TOKENS_MAX + 1}, ValueError, "block_tokens"),
        ({"block_tokens": 16.0}, TypeError, "block_tokens"),
        ({"group": -1}, ValueError, "group"),
        ({"group": U64_MAX + 1}, ValueError, "group"),
        ({"rank": 0}, TypeError, "rank must be a CacheRankIdentity"),
    ],
)
def test_what_is_no_field(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        keys(**changed)


def test_a_salt_may_be_text_or_bytes() -> None:
    assert keys(salt="tenant") == keys(salt=b"tenant")
    assert keys(salt="") == keys()


def test_the_largest_block() -> None:
    made = keys(block_tokens=BLOCK_TOKENS_MAX)
    tokens = np.arange(BLOCK_TOKENS_MAX + 1, dtype=np.uint32)
    expected = hashlib.sha256(made.root + tokens[:-1].astype("<u4").tobytes()).digest()
    assert [bytes(key) for key in made.chain(tokens)] == [expected]


def test_it_shows_no_salt() -> None:
    shown = repr(keys(salt="secret"))
    assert "secret" not in shown
    assert "4 tokens" in shown
