"""Numbers that stop at the bound of 64 bits instead of leaving it.

Why: telemetry is written in the middle of other work by plain assignments (`row.demand_hits += 1`)
and must neither fail there nor hand out a number that other languages cannot read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, get_type_hints

import msgspec
from msgspec.structs import astuple, force_setattr

from shmcache.bounds import U64_MAX, instance, u64


class Saturating(msgspec.Struct):
    """A mutable struct whose numbers are u64: an assignment above the bound sets the bound.

    Errors: a negative number is a mistake in the caller's program (`ValueError`), as is another
    type (`TypeError`); so is a number above the bound in the constructor or in decoded bytes.

    Cost: 0.2 us per assignment, where a plain struct takes 0.07 (tools/benchmarks/telemetry.py).
    """

    # The fields that are no plain numbers; a subclass that has some names them.
    _structured: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        # An unknown name is refused by the struct itself.
        if type(value) is int and 0 <= value <= U64_MAX and name not in self._structured:
            force_setattr(self, name, value)
        elif name in (checks := _checks(type(self))):
            bounded = min(value, U64_MAX) if type(value) is int else value
            force_setattr(self, name, checks[name](bounded, name))
        else:
            super().__setattr__(name, value)

    def __post_init__(self) -> None:
        values = astuple(self)
        if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= U64_MAX:
            return
        for name, check in _checks(type(self)).items():
            force_setattr(self, name, check(getattr(self, name), name))


@cache
def _checks(cls: type[msgspec.Struct]) -> dict[str, Callable[[Any, str], Any]]:
    hints = get_type_hints(cls)
    return {name: _check(hints[name]) for name in cls.__struct_fields__}


def _check(hint: Any) -> Callable[[Any, str], Any]:
    if hint is int:
        return u64
    if hint == int | None:
        return lambda value, name: None if value is None else u64(value, name)
    kind = getattr(hint, "__origin__", hint)
    return lambda value, name: instance(value, kind, name)
