"""Sizes as people write them: `8GiB`, `512M`, `1_000_000`; and numbers that are numbers.

Contract: one letter (K M G T P E) or letter with `iB` is a power of 1024, letter with `B` a power
of 1000, nothing or `B` is bytes; upper or lower case, with or without a space. A fraction
must come to whole bytes. `parse_size(format_size(n)) == n` whenever one decimal says n exactly.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from shmcache.bounds import U64_MAX
from shmcache.errors import size_text

SIZE_HELP = "bytes, or K M G T (KiB MiB GiB TiB: powers of 1024), or KB MB GB TB (powers of 1000)"

_SIZE = re.compile(r"(?P<number>[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?) ?(?P<unit>[A-Za-z]*)")
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", start=1):
    _FACTORS[_letter] = _FACTORS[f"{_letter}ib"] = 1024**_power
    _FACTORS[f"{_letter}b"] = 1000**_power

format_size = size_text

if TYPE_CHECKING:
    _IntParam = click.ParamType[int]
else:
    _IntParam = click.ParamType  # subscriptable only in the newest releases of click


def parse_size(text: str) -> int:
    """The number of bytes that `text` names; `ValueError` says what is wrong with it."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write {SIZE_HELP}")
    factor = _FACTORS.get(match["unit"].lower())
    if factor is None:
        raise ValueError(f"{match['unit']!r} in {text!r} is not a unit: write {SIZE_HELP}")
    size_bytes = Fraction(match["number"]) * factor
    if size_bytes.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if size_bytes > U64_MAX:
        raise ValueError(f"{text!r} is more than {U64_MAX} bytes")
    return int(size_bytes)


class _Size(_IntParam):
    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):  # a default given in code
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()


class FiniteRange(click.FloatRange):
    """A range of numbers to which "nan" and "inf" do not belong."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number, or a complaint."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail("not a finite number", param, ctx)
        return number
