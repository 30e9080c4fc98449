"""What a declared policy can get wrong: a schedule of layers, or the geometry of one layer."""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from shmcache.errors.base import ContractError, variant


class LayerScheduleError(ContractError):
    """A schedule does not fit the model's depth, or a window is none."""

    Empty: TypeAlias = "_ScheduleEmpty"
    LayerCount: TypeAlias = "_ScheduleLayerCount"
    ZeroWindow: TypeAlias = "_ScheduleZeroWindow"
    MissingWindow: TypeAlias = "_ScheduleMissingWindow"
    WindowOutOfRange: TypeAlias = "_ScheduleWindowOutOfRange"


@variant("a schedule needs at least one layer")
class _ScheduleEmpty(LayerScheduleError):
    pass


@variant(
    "the model has {expected} layers, the schedule {actual}", hint="give one policy for each layer"
)
class _ScheduleLayerCount(LayerScheduleError):
    expected: int
    actual: int


@variant(
    "a sliding window must hold at least one token",
    hint="the window counts the current token; use full attention for no window",
)
class _ScheduleZeroWindow(LayerScheduleError):
    pass


@variant("the pattern has sliding layers but no window is given", hint="pass the window in tokens")
class _ScheduleMissingWindow(LayerScheduleError):
    pass


@variant("a window of {window} tokens does not fit a signed 32-bit integer")
class _ScheduleWindowOutOfRange(LayerScheduleError):
    window: int


class CachePolicyError(ContractError):
    """The policy of a layer or of one of its tensors contradicts itself."""

    Invalid: TypeAlias = "_PolicyInvalid"


@variant("the cache policy is invalid: {code}")
class _PolicyInvalid(CachePolicyError):
    """`code` is `not_positive`, `attention_window_range`, `dimension_range`, `no_state_tensors`,
    `duplicate_role`, `invalid_shape`, `wrong_residency` or `resolved_dimension_range`."""

    code: str
    message: str = field(default="", compare=False)
