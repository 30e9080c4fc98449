"""Fingerprints, bit by bit (prompt_cache 2)."""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import U32_MAX
from shmcache.policy.fingerprints import (
    derive_prompt_cache_architecture_fingerprint,
    is_sha256_hex,
    prompt_cache_token_fingerprint,
)
from tests.policy.samples import texts, u32s

TOKENS: dict[tuple[int, ...], str] = {
    (): "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    (5, 6, 7): "2e4c4603cb0dea8636f8e802bfa0f24caef5f9943377f91d89fd6fbd9577cd1c",
    (7, 6, 5): "491fcb766f26b9b48138408d1ba0ad017c589655e545147ed9019e6224a9ac84",
    (1, 256): "242045e2f1bb37769b514f182fd91b3d215324cb57f187cced1e9c62921dbac3",
    (65537,): "507503b51960cceda8d924904fb85377fe7d177fb8dfcf56b24e4557644ed486",
    (U32_MAX,): "ad95131bc0b799c0b1af477fb14fcf26a6a9f76079e48bf090acb7e8367bfd0e",
    (11, 22, 33, 44, 55, 66): "bad4665655d523c8e049c5e3f8a35a8db3a369176ac8f6cfdfd8bee69ecf208b",
}
ARCHITECTURES: tuple[tuple[str, tuple[tuple[str, str], ...], str], ...] = (
    ("demo", (), "9110e4476a04e1b4591af072f6f2fa13b971995c746596142c11c5cd3c173ce4"),
    (
        "demo",
        (("layers", "1"),),
        "28510c53147a3f38381d4bb2e41e576b32c28f6794ea5e3bf03066992fd995d7",
    ),
    (
        "demo",
        (("b", "2"), ("a", "1")),
        "e7630ca4f73df35aae1392ed9c95903e775fa4874509affc305de9d998d3f353",
    ),
    (
        "demo",
        (("a", "1"), ("a", "0")),
        "86abf7bd021fc9484698d309d87f658ac2903f764d6a0dd16e3d4f9f5a02e4de",
    ),
    ("demo", (("a", "0"),), "65caa297e6ad491de6458c74019d4b7d1c4803e173bba2c2169663ac021dbb62"),
    ("demo", (("ab", "c"),), "e472ce7d4a07d2120551aaefdd791f84f69b65c6195724b65ff6240c7f334cf1"),
    ("demo", (("a", "bc"),), "3414c8586203541d15fa1dde84010ab12264163094bbc93c7d6c852efa622c08"),
    ("démo", (("größe", "8"),), "14aed86ea4c9e21cedb232415917fcb70e5c35c6bf6948ef16d372e019953861"),
    (
        "llama",
        (("layers", "32"), ("hidden_size", "4096")),
        "9ee0b30ea8687d04eb4b65db3a58ccfff0a72bdd502805e9fdd6edb223ca5949",
    ),
)


class Token(IntEnum):
    FIVE = 5


def test_token_vectors() -> None:
    """prompt_cache 2.1"""
    for tokens, expected in TOKENS.items():
        for form in (tokens, list(tokens), iter(tokens), (token for token in tokens)):
            assert prompt_cache_token_fingerprint(form) == expected
    assert prompt_cache_token_fingerprint([Token.FIVE, 6, 7]) == TOKENS[5, 6, 7]
    assert prompt_cache_token_fingerprint(range(5, 8)) == TOKENS[5, 6, 7]


@given(st.lists(u32s))
def test_tokens_are_hashed_as_little_endian_words(tokens: list[int]) -> None:
    """prompt_cache 2.1"""
    packed = b"".join(struct.pack("<I", token) for token in tokens)
    assert prompt_cache_token_fingerprint(tokens) == hashlib.sha256(packed).hexdigest()


def test_what_is_no_token() -> None:
    """prompt_cache 2.1: a domain error, wherever it stands."""
    wrong: tuple[tuple[Any, type[Exception]], ...] = (
        (-1, ValueError),
        (U32_MAX + 1, ValueError),
        (1 << 90, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
    )
    for token, error in wrong:
        for tokens in ([token], [1, token], [token, 1]):
            with pytest.raises(error, match="token id"):
                prompt_cache_token_fingerprint(tokens)


def test_architecture_vectors() -> None:
    """prompt_cache 2.2"""
    derive = derive_prompt_cache_architecture_fingerprint
    for family, fields, expected in ARCHITECTURES:
        for order in (fields, fields[::-1], list(fields), iter(fields), set(fields)):
            assert derive(family, order) == f"sha256:{expected}"
    assert derive("demo", {"b": "2", "a": "1"}.items()) == derive("demo", ARCHITECTURES[2][1])


def test_the_byte_stream_of_the_second_row() -> None:
    """prompt_cache 2.2: 77 bytes"""
    domain = b"eredu-prompt-cache-architecture-v1"
    parts = (domain, b"demo", b"layers", b"1")
    stream = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    assert len(stream) == 77
    assert f"sha256:{hashlib.sha256(stream).hexdigest()}" == (
        derive_prompt_cache_architecture_fingerprint("demo", [("layers", "1")])
    )


@given(texts, st.lists(st.tuples(texts, texts), max_size=5), st.randoms())
def test_order_does_not_matter_but_repetition_does(
    family: str, fields: list[tuple[str, str]], random: Any
) -> None:
    """prompt_cache 2.2: sorted by UTF-8 bytes, duplicates hashed twice."""
    ordered = sorted(fields, key=lambda pair: (pair[0].encode(), pair[1].encode()))
    digest = hashlib.sha256()
    for part in ("eredu-prompt-cache-architecture-v1", family, *sum(ordered, ())):
        digest.update(struct.pack("<Q", len(part.encode())) + part.encode())
    shuffled = fields[:]
    random.shuffle(shuffled)
    found = derive_prompt_cache_architecture_fingerprint(family, shuffled)
    assert found == f"sha256:{digest.hexdigest()}"
    if fields:
        longer = [*fields, fields[0]]
        assert derive_prompt_cache_architecture_fingerprint(family, longer) != found


def test_what_is_no_text() -> None:
    derive = derive_prompt_cache_architecture_fingerprint
    for family, fields in ((3, []), ("x", [(1, "a")]), ("x", [("a", None)])):
        with pytest.raises(TypeError, match="must be a str"):
            derive(family, fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="surrogate"):
        derive("\ud800", [])


def test_the_shape_of_a_digest() -> None:
    """prompt_cache 2.3"""
    good = "0123456789abcdef" * 4
    assert is_sha256_hex(good)
    for bad in (good[1:], good + "0", good.upper(), f" {good[1:]}", f"sha256:{good}", good + "\n"):
        assert not is_sha256_hex(bad)
    assert not is_sha256_hex(good[:-1] + "٣")  # a digit, but not of these
