"""Fields keep their domain in the constructor, in a decoder and in `replace` (policy 1.1, 1.2)."""

from __future__ import annotations

import itertools
import pickle
from enum import IntEnum
from typing import Any, ClassVar, TypeAlias

import msgspec
import pytest

from shmcache.bounds import I32_MAX, I32_MIN, I64_MAX, I64_MIN, U32_MAX, U64_MAX
from shmcache.policy.fields import I32, I64, U32, U64, Checked, Nz32, Usize
from shmcache.policy.payload import PayloadEnum, declare


class Shape(PayloadEnum, frozen=True, gc=False):
    Point: ClassVar[type[ShapePoint]]
    Circle: ClassVar[type[ShapeCircle]]


class ShapePoint(Shape, frozen=True, gc=False, tag="point"):
    pass


class ShapeCircle(Shape, frozen=True, gc=False, tag="circle"):
    radius: Nz32


AnyShape: TypeAlias = ShapePoint | ShapeCircle
declare(Shape, AnyShape)


class Sample(Checked, frozen=True, kw_only=True, gc=False):
    u32: U32 = 0
    u64: U64 = 0
    usize: Usize = 0
    nz32: Nz32 = 1
    i32: I32 = 0
    i64: I64 = 0
    text: str = ""
    flag: bool = False
    maybe: Usize | None = None
    pair: tuple[Usize, Usize] | None = None
    many: tuple[I32, ...] = ()
    shape: AnyShape = ShapePoint()


class Number(IntEnum):
    SEVEN = 7


class Text(str):
    pass


RANGES = {
    "u32": (0, U32_MAX),
    "u64": (0, U64_MAX),
    "usize": (0, U64_MAX),
    "nz32": (1, U32_MAX),
    "i32": (I32_MIN, I32_MAX),
    "i64": (I64_MIN, I64_MAX),
    "maybe": (0, U64_MAX),
}


def constructed(name: str, value: Any) -> Sample:
    return Sample(**{name: value})


def replaced(name: str, value: Any) -> Sample:
    return msgspec.structs.replace(Sample(), **{name: value})


def decoded(name: str, value: Any) -> Sample:
    return msgspec.json.decode(msgspec.json.encode({name: value}), type=Sample)


def converted(name: str, value: Any) -> Sample:
    return msgspec.convert({name: value}, Sample, strict=True)


MAKERS = (constructed, replaced, decoded, converted)


def test_both_ends_are_inside_and_one_beyond_is_not() -> None:
    for make, (name, (low, high)) in itertools.product(MAKERS, RANGES.items()):
        for inside in (low, high):
            assert getattr(make(name, inside), name) == inside
        for outside in (low - 1, high + 1, 1 << 90):
            expected = f"{name} must be between {low} and {high}"
            with pytest.raises(ValueError, match=expected) as caught:
                make(name, outside)
            is_decode_failure = isinstance(caught.value, msgspec.ValidationError)
            assert is_decode_failure == (make in (decoded, converted))


WRONG: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(RANGES, (True, 1.0, "1", [1], {})),
    "u32": (None, True, 0.0),
    "text": (1, None, b"x"),
    "flag": (1, 0, None, "true"),
    "pair": (3, [True, 1], ["1", 2], {}),
    "many": (3, "12", [1, None], [1, 1.5], [True]),
    "shape": (3, "point", {"kind": "oval"}, {"kind": "circle"}, None),
}


def test_a_wrong_type_is_refused() -> None:
    """bool, float and text are no numbers."""
    for make, (name, values) in itertools.product(MAKERS, WRONG.items()):
        expected = TypeError if make in (constructed, replaced) else msgspec.ValidationError
        for value in values:
            if isinstance(value, bytes) and make is decoded:
                continue  # becomes base64 text on the way
            with pytest.raises(expected):
                make(name, value)


def test_a_pair_has_two_elements() -> None:
    for make, value in itertools.product(MAKERS, ([], [1], [1, 2, 3])):
        with pytest.raises(ValueError, match=r"2 elements|length 2"):
            make("pair", value)


def test_a_lone_surrogate_is_no_text() -> None:
    for name in ("\ud800", "a\udfffb"):
        with pytest.raises(ValueError, match="text has a lone surrogate at"):
            Sample(text=name)
    assert Sample(text="grüße \U0001f600").text == "grüße \U0001f600"


def test_subclasses_become_what_an_encoder_knows() -> None:
    odd = Sample(u32=Number.SEVEN, text=Text("x"), pair=(Number.SEVEN, 1), many=(1, Number.SEVEN))
    plain = Sample(u32=7, text="x", pair=(7, 1), many=(1, 7))
    assert odd == plain
    assert type(odd.u32) is type(odd.many[1]) is int
    assert type(odd.text) is str
    assert msgspec.json.encode(odd) == msgspec.json.encode(plain)


def test_a_list_becomes_a_tuple_so_that_values_hash() -> None:
    lists: Any = {"many": [1, 2], "pair": [3, 4]}
    sample = Sample(**lists)
    assert (sample.many, sample.pair) == ((1, 2), (3, 4))
    assert hash(sample) == hash(Sample(many=(1, 2), pair=(3, 4)))


def test_values_are_immutable_and_keyword_only() -> None:
    sample: Any = Sample()
    with pytest.raises(AttributeError):
        sample.u32 = 3
    with pytest.raises(TypeError):
        Sample(1)  # type: ignore[call-arg]


def test_a_family_knows_its_variants() -> None:
    assert Shape.Point is ShapePoint
    assert Shape.Circle is ShapeCircle
    circle = Shape.Circle(radius=3)
    assert isinstance(circle, Shape)
    assert circle == Shape.Circle(3)
    assert circle.radius == 3
    assert len({Shape.Point(), Shape.Point(), circle, Shape.Circle(4)}) == 3
    assert Shape.Point() < Shape.Circle(1) < Shape.Circle(2)
    assert pickle.loads(pickle.dumps(circle)) == circle
    assert msgspec.json.encode(circle) == b'{"kind":"circle","radius":3}'


def test_a_family_is_no_value_and_a_class_is_no_variant() -> None:
    with pytest.raises(TypeError, match="Shape is a family"):
        Shape()
    slip: Any = Shape.Point
    with pytest.raises(TypeError, match="shape must be a Shape, not the class ShapePoint"):
        Sample(shape=slip)
