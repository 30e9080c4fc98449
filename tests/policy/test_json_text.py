"""Strict JSON: duplicates, nesting and what JSON does not know are refused, in bounded time."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmcache.bounds import JSON_NESTING_MAX
from shmcache.policy.json_text import read_json, write_json

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.sampled_from(['":', '"{', "}]", "\\", '\\"', "\\u003a", ":", "a:b"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*"abc", ":", '":', "\\", ""]), inner, max_size=4)
    ),
    max_leaves=20,
)


def has_duplicate(text: str) -> bool:
    """By another way: the standard library's pairs."""
    found = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        found = found or len(dict(pairs)) < len(pairs)

    json.loads(text, object_pairs_hook=look)
    return found


@given(values, st.booleans(), st.sampled_from([None, 1, 2]))
def test_what_has_no_duplicate_is_read(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for form in (text, text.encode(), text.replace(":", " :  ")):
        assert json.dumps(read_json(form)) == json.dumps(json.loads(form))


@st.composite
def texts_with_repeats(draw: st.DrawFn) -> str:
    """JSON whose objects may repeat keys, some of them spelled with escapes."""
    keys = st.sampled_from([*"ab", ":", '"', "\\", "\u00e9", "\\u003a"])

    def spell(text: str) -> str:
        plain = json.dumps(text, ensure_ascii=draw(st.booleans()))
        return plain.replace(":", draw(st.sampled_from([":", r"\u003a", r"\u003A"])))

    def write(depth: int) -> str:
        kind = draw(st.sampled_from("sno" if depth < 3 else "s"))
        if kind == "s":
            return spell(draw(keys))
        parts = [write(depth + 1) for _ in range(draw(st.integers(0, 3)))]
        if kind == "n":
            return f"[{','.join(parts)}]"
        return "{" + ",".join(f"{spell(draw(keys))}:{part}" for part in parts) + "}"

    return write(0)


@example('{"a":1,"a":1}')
@example(r'{"a":"\u003a","a":1}')  # the escape must not balance the lost key's colon
@example(r'{"a":1,"\u0061":":"}')
@example(r'{"\\u003a":1,"\\u003a":"\\:"}')
@example(r'{"a\\":1,"a\\\\":"\":"}')
@example('{"x":{"a":{},"b":[{"a":1,"c":2,"a":3}]}}')
@given(texts_with_repeats())
def test_a_repeated_key_is_refused_wherever_it_stands(text: str) -> None:
    if has_duplicate(text):
        with pytest.raises(msgspec.DecodeError, match="duplicate key"):
            read_json(text)
    else:
        assert read_json(text) == json.loads(text)


def test_the_duplicate_is_named() -> None:
    with pytest.raises(msgspec.ValidationError, match="duplicate key 'blocks'"):
        read_json(b'{"x": 1, "blocks": [], "y": {"z": 2}, "blocks": []}')


def test_nesting_has_a_limit() -> None:
    """Brackets in strings are no levels; siblings add none."""
    nests = {"[{}]": 1, '{{"a":{}}}': 1, '{{"[":[{}]}}': 2, '[["]}}[[",{}]]': 2, '[7,{}," "]': 1}
    for nest, levels in nests.items():
        text = "7"
        for _ in range(JSON_NESTING_MAX // levels):
            text = nest.format(text)
        assert read_json(text) == json.loads(text)
        for deeper in (f"[{text}]", f'{{"a":{text}}}', nest.format(text), f"[1,[],{text},[[]]]"):
            with pytest.raises(msgspec.DecodeError, match="nested deeper than 64"):
                read_json(deeper)


def test_hostile_nesting_ends_in_a_typed_error() -> None:
    """Far beyond any stack, open or closed, in any position."""
    many = 200_000
    for text in (
        "[" * many,
        '{"a":' * many,
        "[" * many + "]" * many,
        '{"a":' * many + "1" + "}" * many,
        '"x"' + "[" * many,
        "[" * many + '"',
        '["]",' * many,
        '["\\"]",' * many,
        "[]" * many + "[" * many,
        "]" * many + "[" * many,
    ):
        with pytest.raises(msgspec.DecodeError):
            read_json(text)


@given(values, st.data())
def test_a_cut_text_is_refused_and_never_called_deep(value: Any, data: st.DataObject) -> None:
    text = json.dumps([value])
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(msgspec.DecodeError) as caught:
        read_json(text[:cut])
    assert "nested" not in str(caught.value)


def test_what_is_no_json_is_refused() -> None:
    for text in (
        b"",
        b" ",
        b"NaN",
        b"[Infinity]",
        b"[-Infinity]",
        b'{"a":nan}',
        b"[1e999]",
        b"\xef\xbb\xbf{}",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'"\x01"',
        b"'a'",
        b"{a:1}",
        b"[1,]",
        b"{} {}",
        b"{}x",
        b"01",
        b"+1",
        b"0x10",
        b"// no\n{}",
        b"\x80\x04]",
        b"[" + b"9" * 5000 + b"]",
        "\ud800",
        "{}".encode("utf-16"),
    ):
        with pytest.raises(msgspec.DecodeError):
            read_json(text)
    for wrong in (None, 3, bytearray(b"{}"), ["{}"]):
        with pytest.raises(TypeError, match="JSON text"):
            read_json(wrong)  # type: ignore[arg-type]


@given(st.binary(max_size=40) | st.text(alphabet='[]{}":,\\ua0 1', max_size=40).map(str.encode))
def test_noise_ends_in_a_value_or_a_typed_error(text: bytes) -> None:
    try:
        value = read_json(text)
    except msgspec.DecodeError:
        return
    assert not has_duplicate(text.decode())
    assert json.dumps(value) == json.dumps(json.loads(text))


@given(values)
def test_the_written_form_is_that_of_an_indenting_dump(value: Any) -> None:
    """prompt_cache 9"""
    assert write_json(value).decode() == json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def test_escapes_are_written_like_the_original() -> None:
    """prompt_cache 9"""
    text = "".join(map(chr, range(0x20))) + '\x7f\x85\u2028é\U0001f600/"\\'
    value = {text: [text, [], {}, {"a": []}]}
    assert write_json(value).decode() == json.dumps(value, indent=2, ensure_ascii=False) + "\n"
