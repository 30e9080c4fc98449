"""Enums whose variants carry a payload, and values that have an order.

Why: Rust's enum with payload becomes one base class and one frozen class per variant, which msgspec
decodes as a tagged union. The base knows its variants, so that one codec (wire.py) serves all.

    class Shape(PayloadEnum, frozen=True, gc=False):
        Point: ClassVar[type[ShapePoint]]
        Circle: ClassVar[type[ShapeCircle]]

    class ShapePoint(Shape, frozen=True, gc=False, tag="point"): ...
    class ShapeCircle(Shape, frozen=True, gc=False, tag="circle"):
        radius: Nz32

    AnyShape: TypeAlias = ShapePoint | ShapeCircle  # what annotations use
    declare(Shape, AnyShape)

Contract: an unnamed payload is a field called `value`. Order: variants as declared, then payload.
"""

from __future__ import annotations

from enum import Enum
from functools import total_ordering
from typing import Any, ClassVar, get_args

from shmcache.policy.fields import Checked


@total_ordering
class Ordered:
    """Values of one family compare by `sort_key()`; None sorts before any value."""

    __slots__ = ()

    def sort_key(self) -> Any:
        """What the order compares: a tuple, or an int for an enum."""
        raise NotImplementedError

    @classmethod
    def family(cls) -> type:
        """The class whose values all compare with each other."""
        return cls

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Ordered) or self.family() is not other.family():
            return NotImplemented
        return bool(self.sort_key() < other.sort_key())


class OrderedEnum(Ordered, Enum):
    """An enum whose members are ordered as declared."""

    def __init__(self, *_: object) -> None:
        self.position = len(type(self).__members__)

    def sort_key(self) -> int:
        """The place of the declaration."""
        return self.position


class PayloadEnum(Ordered, Checked, frozen=True, gc=False, tag_field="kind"):
    """Base of a family; its direct subclasses are families, theirs are variants."""

    variants: ClassVar[dict[str, type[PayloadEnum]]]  # by serialised spelling, as declared
    union: ClassVar[Any]  # of all variants
    position: ClassVar[int]

    def __post_init__(self) -> None:
        if type(self) is self.family():
            raise TypeError(f"{type(self).__name__} is a family, make one of its variants")
        super().__post_init__()

    @classmethod
    def family(cls) -> type[PayloadEnum]:
        """The base class of the variants."""
        return next(base for base in cls.__mro__ if base.__base__ is PayloadEnum)

    def sort_key(self) -> tuple[Any, ...]:
        """The place of the variant, then its payload."""
        payload = (getattr(self, name) for name in self.__struct_fields__)
        return (self.position, *map(order_key, payload))


def order_key(value: object) -> tuple[Any, ...]:
    """A key that puts None before every value of its kind."""
    if value is None:
        return (0,)
    return (1, value.sort_key() if isinstance(value, Ordered) else value)


def declare(family: type[PayloadEnum], union: Any) -> None:
    """Tell `family` its variants; each becomes an attribute, named without the family's name."""
    family.variants, family.union = {}, union
    for position, variant in enumerate(get_args(union) or (union,)):
        variant.position = position
        family.variants[variant.__struct_config__.tag] = variant
        setattr(family, variant.__name__.removeprefix(family.__name__), variant)
