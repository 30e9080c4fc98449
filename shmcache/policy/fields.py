"""Struct fields that keep their domain: the annotation says it, every way of making a value obeys.

Why: msgspec checks types while decoding and nothing in the constructor, and a bound beyond int64
nowhere. Here `rank: Usize` is enough: the constructor, a decoder and `msgspec.structs.replace` all
end in `__post_init__`, which checks each field by its annotation.

Contract: a wrong type raises `TypeError`, a number outside its range `ValueError`; a decoder turns
both into `msgspec.ValidationError`. A list given for a tuple becomes one. Rules that need more than
one field are not domains: they live in `validate()` and raise the errors of the contract.

Cost: 0.1 us per field, and as much per element of a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import force_setattr

from shmcache.bounds import i32, i64, instance, nz32, u32, u64, usize

Check: TypeAlias = Callable[[object, str], object]

U32: TypeAlias = Annotated[int, u32]
U64: TypeAlias = Annotated[int, u64]
Usize: TypeAlias = Annotated[int, usize]
Nz32: TypeAlias = Annotated[int, nz32]
I32: TypeAlias = Annotated[int, i32]
I64: TypeAlias = Annotated[int, i64]


class Checked(msgspec.Struct, frozen=True, gc=False):
    """Base of the value types of this package.

    Immutable values cannot form cycles, so the garbage collector need not track them.
    """

    def __post_init__(self) -> None:
        for name, check in checks(type(self)):
            given = getattr(self, name)
            checked = check(given, name)
            if checked is not given:
                force_setattr(self, name, checked)


@cache
def hints(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """The resolved annotation of each field, in declaration order."""
    found = get_type_hints(cls, include_extras=True)
    return {name: found[name] for name in cls.__struct_fields__}


@cache
def checks(cls: type[msgspec.Struct]) -> tuple[tuple[str, Check], ...]:
    """The domain of each field of `cls`."""
    return tuple((name, _check(hint)) for name, hint in hints(cls).items())


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union without None; a hint that is no union is its own only member."""
    if get_origin(hint) not in (Union, UnionType):
        return (hint,)
    return tuple(member for member in get_args(hint) if member is not NoneType)


def text(value: object, what: str) -> str:
    """`value`, if it is a str that UTF-8 can carry: one without lone surrogates."""
    if type(value) is str and value.isascii():
        return value
    try:
        instance(value, str, what).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has a lone surrogate at {error.start}") from None
    return str(value)


def _check(hint: Any) -> Check:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        declared: Check = args[1]
        return declared
    if hint is str:
        return text
    if origin in (Union, UnionType):
        members = alternatives(hint)
        # Several members are the variants of one payload enum: its base class takes them all.
        inner = _check(members[0] if len(members) == 1 else members[0].__base__)
        return _optional(inner) if NoneType in args else inner
    if origin is tuple and args[-1] is not Ellipsis:
        return _pair(_check(args[0]), _check(args[1]))
    if origin is not None:
        return _sequence(origin, _check(args[0]))
    return _instance(hint)


def _instance(kind: type) -> Check:
    def check(value: object, what: str) -> object:
        if isinstance(value, kind):
            return value
        if isinstance(value, type):  # a slip: AttentionPolicy.Full without ()
            raise TypeError(f"{what} must be a {kind.__name__}, not the class {value.__name__}")
        return instance(value, kind, what)

    return check


def _optional(inner: Check) -> Check:
    return lambda value, what: None if value is None else inner(value, what)


def _tuple(value: object, what: str) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else instance(value, tuple, what)


def _pair(first: Check, second: Check) -> Check:
    def check(value: object, what: str) -> object:
        given = _tuple(value, what)
        if len(given) != 2:
            raise ValueError(f"{what} must have 2 elements, not {len(given)}")
        return first(given[0], what), second(given[1], what)

    return check


def _sequence(kind: type, inner: Check) -> Check:
    def check(value: object, what: str) -> object:
        given: Any = value
        if type(value) is not kind:
            given = _tuple(value, what) if kind is tuple else instance(value, kind, what)
        for element in given:
            if inner(element, what) is not element:
                return kind(inner(element, what) for element in given)
        return given

    return check
