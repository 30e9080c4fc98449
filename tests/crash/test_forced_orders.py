"""Rare orders of several processes, forced by ptrace; each has a mutant that it catches."""

import pytest

from tests.crash.conftest import CLEAN, VIOLATED, Experiment


def test_a_cleaner_that_comes_back_changes_nothing(crash: Experiment) -> None:
    """Stopped outside the lock, before or between its steps, while its slot gets a new owner."""
    outcome = crash("fence", "--every", 5)
    assert outcome.code == CLEAN, outcome.text
    assert outcome.total("points") > 30


@pytest.mark.ci
def test_a_cleaner_that_comes_back_at_any_instruction_changes_nothing(crash: Experiment) -> None:
    """The same at every instruction outside the lock."""
    outcome = crash("fence")
    assert outcome.code == CLEAN, outcome.text
    assert outcome.total("points") > 150


def test_waiters_of_a_stopped_holder_come_back(crash: Experiment) -> None:
    """C47, C56: slices end, signals are served, nobody enters, the holder's change stands."""
    outcome = crash("stopped")
    assert outcome.code == CLEAN, outcome.text
    assert outcome.total("slices") >= 3


def test_a_stranded_sleeper_proceeds(crash: Experiment) -> None:
    """C50: the woken waiter dies, a third process barged in, nobody wakes the next."""
    outcome = crash("stranded")
    assert outcome.code == CLEAN, outcome.text


def test_the_kernels_pending_word_is_always_the_lock(crash: Experiment) -> None:
    """C49: at no instruction of request, close and reopen does it name memory of another use."""
    outcome = crash("pending")
    assert outcome.code == CLEAN, outcome.text
    assert outcome.total("windows") > 0


def test_damage_gives_everybody_an_answer(crash: Experiment) -> None:
    """C43: a validation that fails under the lock, its finder killed at every instruction."""
    outcome = crash("damage")
    assert outcome.code == CLEAN, outcome.text
    assert len(outcome.figures) == 2


@pytest.mark.parametrize(
    ("mutant", "experiment"),
    [("NO_NONCE", "fence"), ("UNFENCED_CLEANING", "fence"), ("PLAIN_LOCK", "stopped")],
)
def test_the_mutant_is_caught(crash: Experiment, mutant: str, experiment: str) -> None:
    """Each scene fails without the decision that it is there for."""
    outcome = crash(experiment, mutant=mutant)
    assert outcome.code == VIOLATED, outcome.text


def test_a_plain_lock_strands_a_sleeper(crash: Experiment) -> None:
    """C50 with mutant PLAIN_LOCK: why every wait is cut into slices."""
    outcome = crash("stranded", mutant="PLAIN_LOCK")
    if outcome.code == CLEAN:
        pytest.skip("this kernel wakes the next waiter when a woken one dies")
    assert outcome.code == VIOLATED, outcome.text
