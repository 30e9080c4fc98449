"""How an error family is declared: one base class, one nested subclass per condition.

Why: a caller catches `CachePoolError.BudgetExceeded` and reads `error.required`, a test compares
whole errors, a worker sends one through a pipe. So an error is a value: its payload fields are
attributes, constructor parameters and `args`, in the order of the table; equality and hash follow
class and payload; pickle keeps all of it.

A family is a list of names and a few lines per condition:

    class CacheThingError(ContractError):
        Missing: TypeAlias = "_ThingMissing"  # the name users write; replaced by the class

    @variant("no thing has the id {id}", hint="store it first")
    class _ThingMissing(CacheThingError):
        id: int

The alias lets a type checker take `CacheThingError.Missing` for a class and for a type, although a
class body cannot name itself. Payload types of higher layers are written as a builtin base or
`Any`, because this file imports nothing of ours.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size_text(size_bytes: int, *, exact: bool = False) -> str:
    """`1.5 GiB`. One decimal at most; `exact` adds the byte count where that decimal lies."""
    unit, scale = 0, 1
    while unit + 1 < len(_SIZE_UNITS) and _tenths(size_bytes, scale) >= 10240:
        unit, scale = unit + 1, scale << 10
    whole, tenth = divmod(_tenths(size_bytes, scale), 10)
    text = f"{whole}.{tenth} {_SIZE_UNITS[unit]}" if tenth else f"{whole} {_SIZE_UNITS[unit]}"
    if exact and (whole * 10 + tenth) * scale != size_bytes * 10:
        return f"{text} ({size_bytes} bytes)"
    return text


def _tenths(size_bytes: int, scale: int) -> int:
    return (size_bytes * 10 + scale // 2) // scale


class _Text(string.Formatter):
    """Templates may say `{needed:size}`; an enum shows its serialised spelling."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "size":
            return size_text(value, exact=True)
        shown = value.value if isinstance(value, Enum) else value
        return str(super().format_field(shown, format_spec))


_TEXT = _Text()


class ContractError(Exception):
    """Base of all families. Catch it to catch whatever this package raises on purpose.

    Only variants are raised: a family has no payload that would say what happened.
    """

    _payload: ClassVar[tuple[str, ...]] = ()
    _prose: ClassVar[tuple[str, ...]] = ()
    _text: ClassVar[str] = ""
    _hint: ClassVar[str] = ""
    _cause: ClassVar[str] = ""

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__qualname__} is a family, raise one of its variants")

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, name) for name in self._payload)
        if self._cause:
            self.__cause__ = getattr(self, self._cause)

    @property
    def hint(self) -> str:
        """What to do next, or an empty string."""
        return _TEXT.format(self._hint, **vars(self))

    def __str__(self) -> str:
        prose = [vars(self)[name] for name in self._prose]
        parts = [_TEXT.format(self._text, **vars(self)), *prose, self.hint]
        return ": ".join(part for part in parts if part)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(map(repr, self.args))})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, ContractError)
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self), self._identity()))

    def _identity(self) -> tuple[object, ...]:
        compared = (name for name in self._payload if name not in self._prose)
        return tuple(_comparable(getattr(self, name)) for name in compared)


def _comparable(value: object) -> object:
    """Foreign exceptions compare by identity, which no pickle survives: take their kind instead."""
    if isinstance(value, BaseException) and not isinstance(value, ContractError):
        return type(value), getattr(value, "errno", None)
    return value


_Variant = TypeVar("_Variant", bound=ContractError)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def variant(
    text: str, *, hint: str = "", cause: str = ""
) -> Callable[[type[_Variant]], type[_Variant]]:
    """Make the class a variant of its base: its annotations are the payload.

    `text` is one factual line and `hint` says what to do next; together they name every payload
    field (checked here, once). A `message` of free wording is declared `field(default="",
    compare=False)`: shown after the text, no part of equality. `cause` names the payload field
    that is also `__cause__`.
    """

    def declare(cls: type[_Variant]) -> type[_Variant]:
        family = cls.__bases__[0]
        names = [name for name, value in vars(family).items() if value == cls.__name__]
        if len(names) != 1:
            raise TypeError(f"{family.__name__} does not list {cls.__name__}")
        cls.__doc__ = cls.__doc__ or f"{text}."
        made = dataclass(eq=False, repr=False)(cls)
        payload = fields(cast("Any", made))
        made._payload = tuple(f.name for f in payload)
        made._prose = tuple(f.name for f in payload if not f.compare)
        made._text, made._hint, made._cause = text, hint, cause
        shown = {name for _, name, _, _ in _TEXT.parse(text + hint)}
        if unnamed := set(made._payload) - set(made._prose) - shown:
            raise TypeError(f"the text of {cls.__name__} does not name {sorted(unnamed)}")
        made.__name__ = names[0]
        made.__qualname__ = f"{family.__qualname__}.{names[0]}"
        setattr(family, names[0], made)
        return made

    return declare
