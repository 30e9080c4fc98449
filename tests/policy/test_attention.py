"""Attention policies and schedules (policy 2)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import I32_MAX, I32_MIN, U32_MAX
from shmcache.errors import LayerScheduleError
from shmcache.policy.attention import AttentionPolicy, LayerSchedule
from tests.policy.samples import attentions, layers

FULL = AttentionPolicy.Full()
Empty, LayerCount = LayerScheduleError.Empty, LayerScheduleError.LayerCount
ZeroWindow, MissingWindow = LayerScheduleError.ZeroWindow, LayerScheduleError.MissingWindow


def test_sliding() -> None:
    """policy 2.1"""
    assert AttentionPolicy.sliding(8) == AttentionPolicy.Sliding(window=8)
    assert AttentionPolicy.sliding(U32_MAX).window == U32_MAX
    with pytest.raises(ZeroWindow):
        AttentionPolicy.sliding(0)
    for window in (-1, U32_MAX + 1):
        with pytest.raises(ValueError, match="window"):
            AttentionPolicy.sliding(window)
    with pytest.raises(ValueError, match="window"):
        AttentionPolicy.Sliding(window=0)  # unrepresentable, not a rule


def test_from_sliding_window() -> None:
    """policy 2.1"""
    assert AttentionPolicy.from_sliding_window(None) == FULL
    assert AttentionPolicy.from_sliding_window(I32_MAX) == AttentionPolicy.Sliding(I32_MAX)
    for window in (0, -1, I32_MIN):
        with pytest.raises(ZeroWindow):
            AttentionPolicy.from_sliding_window(window)
    for window in (I32_MIN - 1, I32_MAX + 1):
        with pytest.raises(ValueError, match="window"):
            AttentionPolicy.from_sliding_window(window)
    with pytest.raises(TypeError):
        AttentionPolicy.from_sliding_window(True)


def test_windows() -> None:
    """policy 2.1"""
    assert FULL.window is None
    assert FULL.sliding_window_i32() is None
    assert AttentionPolicy.Sliding(I32_MAX).sliding_window_i32() == I32_MAX
    with pytest.raises(LayerScheduleError) as caught:
        AttentionPolicy.Sliding(I32_MAX + 1).sliding_window_i32()
    assert caught.value == LayerScheduleError.WindowOutOfRange(I32_MAX + 1)


@given(st.lists(attentions))
def test_the_order_of_policies(policies: list[Any]) -> None:
    """policy 1.4: Full is below any Sliding; those by window."""
    assert sorted(policies) == sorted(policies, key=lambda policy: policy.window or 0)


def test_new_compares_the_length() -> None:
    """policy 2.2"""
    assert list(LayerSchedule.new(2, iter([FULL, FULL]))) == [FULL, FULL]
    for count, given_layers, error in (
        (0, [FULL], Empty()),
        (0, [], Empty()),
        (2, [FULL], LayerCount(2, 1)),
        (1, [FULL, FULL], LayerCount(1, 2)),
        (1, [], LayerCount(expected=1, actual=0)),
    ):
        with pytest.raises(LayerScheduleError) as caught:
            LayerSchedule.new(count, given_layers)
        assert caught.value == error
    with pytest.raises(ValueError, match="layer_count"):
        LayerSchedule.new(-1, [])


def test_uniform_schedules() -> None:
    """policy 2.2: the window is looked at before the count."""
    assert list(LayerSchedule.all_full(2)) == [FULL, FULL]
    assert list(LayerSchedule.all_sliding(1, 4)) == [AttentionPolicy.Sliding(4)]
    with pytest.raises(Empty):
        LayerSchedule.all_full(0)
    with pytest.raises(ZeroWindow):
        LayerSchedule.all_sliding(0, 0)
    with pytest.raises(Empty):
        LayerSchedule.all_sliding(0, 4)


def test_patterns() -> None:
    """policy 2.2"""
    mixed = LayerSchedule.from_sliding_pattern(3, [True, False, True], 6)
    assert mixed.fingerprint_component() == "s6,f,s6"
    assert mixed.sliding_windows() == {6: 2}
    assert (mixed.full_layer_count(), mixed.sliding_layer_count()) == (1, 2)
    for window in (None, 0, 6):
        full = LayerSchedule.from_sliding_pattern(2, (False, False), window)
        assert full == LayerSchedule.all_full(2)
    for count, pattern, window, error in (
        (3, [True], 6, LayerCount(3, 1)),
        (0, [True], None, LayerCount(0, 1)),
        (2, [True], None, LayerCount(2, 1)),
        (1, [True], None, MissingWindow()),
        (1, [True], 0, ZeroWindow()),
        (0, [], 0, Empty()),
        (0, [], None, Empty()),
    ):
        with pytest.raises(LayerScheduleError) as caught:
            LayerSchedule.from_sliding_pattern(count, pattern, window)
        assert caught.value == error
    numbers: Any = [1, 0]
    with pytest.raises(TypeError, match="pattern"):
        LayerSchedule.from_sliding_pattern(2, numbers, 6)


@given(st.lists(attentions, min_size=1, max_size=9))
def test_counts_and_windows_agree_with_the_layers(policies: list[Any]) -> None:
    """policy 2.2"""
    schedule = LayerSchedule.new(len(policies), policies)
    windows = [policy.window for policy in policies if policy.window is not None]
    assert schedule.full_layer_count() + schedule.sliding_layer_count() == len(schedule)
    assert schedule.sliding_windows() == {one: windows.count(one) for one in windows}
    assert list(schedule.sliding_windows()) == sorted(set(windows))
    parts = schedule.fingerprint_component().split(",")
    assert parts == ["f" if one.window is None else f"s{one.window}" for one in policies]


@given(st.lists(attentions, max_size=5) | st.lists(layers, max_size=5))
def test_a_schedule_is_an_immutable_sequence(policies: list[Any]) -> None:
    """policy 2.2: equal by content, hashable, picklable; `get` has no negative indices."""
    schedule = LayerSchedule(policies)
    assert len(schedule) == len(policies)
    assert list(schedule) == policies
    assert schedule.is_empty() == (not policies)
    assert [schedule.get(index) for index in range(len(policies))] == policies
    assert schedule.get(len(policies)) is None
    assert schedule.get(-1) is None
    assert schedule[1:] == LayerSchedule(policies[1:])
    for twin in (LayerSchedule(policies), copy.deepcopy(schedule)):
        assert twin == schedule
        assert hash(twin) == hash(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    different: Any = [tuple(policies), LayerSchedule([*policies, FULL]), None]
    assert all(schedule != other for other in different)


def test_a_schedule_takes_no_new_attribute_and_reads_well() -> None:
    schedule: Any = LayerSchedule.all_full(1)
    with pytest.raises(AttributeError):
        schedule.note = 1
    assert repr(schedule) == "LayerSchedule([AttentionPolicyFull()])"
