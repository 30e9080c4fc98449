"""Which earlier positions each decoder layer sees.

Why: a layer that slides needs only the end of a prefix, a full one all of it; how much of a cache
must be kept, and whether a stored prefix is complete, follows from this.

Source: the schedule's fingerprint component ("f,s4096,f") is part of what model identities hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeAlias, TypeVar, overload

from shmcache.bounds import I32_MAX, i32, instance, u32, usize
from shmcache.errors import LayerScheduleError
from shmcache.policy.fields import Nz32
from shmcache.policy.payload import PayloadEnum, declare

_Policy = TypeVar("_Policy", covariant=True)


class AttentionPolicy(PayloadEnum, frozen=True, gc=False):
    """What one layer sees: `Full()`, the whole causal prefix, or `Sliding(window)`.

    Units: `window` counts the visible tokens, the current one included.
    """

    Full: ClassVar[type[AttentionPolicyFull]]
    Sliding: ClassVar[type[AttentionPolicySliding]]

    @property
    def window(self) -> int | None:
        """The window of a sliding layer, None for a full one."""
        return None

    @staticmethod
    def sliding(window: int) -> AttentionPolicySliding:
        """`Sliding(window)`; a window above the i32 range is accepted here.

        Errors: `LayerScheduleError.ZeroWindow`.
        """
        if u32(window, "window") == 0:
            raise LayerScheduleError.ZeroWindow()
        return AttentionPolicySliding(window)

    @staticmethod
    def from_sliding_window(window: int | None) -> AnyAttentionPolicy:
        """The policy of a model configuration, where None stands for no window.

        Errors: `LayerScheduleError.ZeroWindow` for a window of 0 or less.
        """
        if window is None:
            return AttentionPolicyFull()
        return AttentionPolicy.sliding(max(i32(window, "window"), 0))

    def sliding_window_i32(self) -> int | None:
        """The window as kernels take it.

        Errors: `LayerScheduleError.WindowOutOfRange`.
        """
        if self.window is not None and self.window > I32_MAX:
            raise LayerScheduleError.WindowOutOfRange(self.window)
        return self.window


class AttentionPolicyFull(AttentionPolicy, frozen=True, gc=False, tag="full"):
    """The whole causal prefix."""


class AttentionPolicySliding(AttentionPolicy, frozen=True, gc=False, tag="sliding"):
    """The last `window` positions, the current one included."""

    window: Nz32


AnyAttentionPolicy: TypeAlias = AttentionPolicyFull | AttentionPolicySliding
declare(AttentionPolicy, AnyAttentionPolicy)


class LayerSchedule(Sequence[_Policy]):
    """An immutable sequence with one policy per decoder layer, equal and hashed by content.

    Contract: the class call takes any length, as a decoder must; `new` compares it with the
    model's depth. JSON: the bare array.
    """

    __slots__ = ("_layers",)

    def __init__(self, layers: Iterable[_Policy] = ()) -> None:
        self._layers = tuple(layers)

    @classmethod
    def new(cls, layer_count: int, layers: Iterable[_Policy]) -> Self:
        """A schedule of exactly `layer_count` layers.

        Errors: `LayerScheduleError.Empty` for no layer, then `LayerCount`.
        """
        if usize(layer_count, "layer_count") == 0:
            raise LayerScheduleError.Empty()
        made = cls(layers)
        if len(made) != layer_count:
            raise LayerScheduleError.LayerCount(layer_count, len(made))
        return made

    @staticmethod
    def all_full(layer_count: int) -> LayerSchedule[AnyAttentionPolicy]:
        """Full attention in every layer.

        Errors: `LayerScheduleError.Empty`.
        """
        return _uniform(layer_count, AttentionPolicyFull())

    @staticmethod
    def all_sliding(layer_count: int, window: int) -> LayerSchedule[AnyAttentionPolicy]:
        """One window in every layer.

        Errors: `LayerScheduleError.ZeroWindow`, then `Empty`.
        """
        return _uniform(layer_count, AttentionPolicy.sliding(window))

    @staticmethod
    def from_sliding_pattern(
        layer_count: int, pattern: Iterable[bool], window: int | None
    ) -> LayerSchedule[AnyAttentionPolicy]:
        """The layers marked True slide. Without any, the window is not looked at.

        Errors: `LayerScheduleError.LayerCount`, `MissingWindow`, `ZeroWindow`, `Empty`, in this
        order.
        """
        marks = [instance(mark, bool, "pattern") for mark in pattern]
        if window is not None:
            u32(window, "window")
        if len(marks) != usize(layer_count, "layer_count"):
            raise LayerScheduleError.LayerCount(layer_count, len(marks))
        full: AnyAttentionPolicy = AttentionPolicyFull()
        if not any(marks):
            return LayerSchedule.new(layer_count, (full for _ in marks))
        if window is None:
            raise LayerScheduleError.MissingWindow()
        sliding = AttentionPolicy.sliding(window)
        return LayerSchedule.new(layer_count, (sliding if mark else full for mark in marks))

    def is_empty(self) -> bool:
        """True without any layer."""
        return not self._layers

    def get(self, index: int) -> _Policy | None:
        """The policy of a layer; None beyond either end."""
        return self._layers[index] if 0 <= index < len(self._layers) else None

    def full_layer_count(self: LayerSchedule[AnyAttentionPolicy]) -> int:
        """How many layers see the whole prefix."""
        return len(self) - self.sliding_layer_count()

    def sliding_layer_count(self: LayerSchedule[AnyAttentionPolicy]) -> int:
        """How many layers have a window."""
        return sum(self.sliding_windows().values())

    def sliding_windows(self: LayerSchedule[AnyAttentionPolicy]) -> dict[int, int]:
        """How many layers have which window, by ascending window."""
        windows = (layer.window for layer in self)
        return dict(sorted(Counter(window for window in windows if window is not None).items()))

    def fingerprint_component(self: LayerSchedule[AnyAttentionPolicy]) -> str:
        """`f` or `s<window>` per layer, joined by commas."""
        return ",".join("f" if one.window is None else f"s{one.window}" for one in self)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[_Policy]:
        return iter(self._layers)

    @overload
    def __getitem__(self, index: int) -> _Policy: ...
    @overload
    def __getitem__(self, index: slice) -> LayerSchedule[_Policy]: ...
    def __getitem__(self, index: int | slice) -> _Policy | LayerSchedule[_Policy]:
        if isinstance(index, slice):
            return LayerSchedule(self._layers[index])
        return self._layers[index]

    def __eq__(self, other: object) -> bool:
        return self._layers == other._layers if isinstance(other, LayerSchedule) else NotImplemented

    def __hash__(self) -> int:
        return hash((LayerSchedule, self._layers))

    def __repr__(self) -> str:
        return f"LayerSchedule({list(self._layers)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerSchedule, (self._layers,)


def _uniform(layer_count: int, policy: AnyAttentionPolicy) -> LayerSchedule[AnyAttentionPolicy]:
    return LayerSchedule.new(layer_count, (policy,) * usize(layer_count, "layer_count"))
