"""G8: bytes found are input. The kept inputs of the fuzzers, and changes of their seeds.

`tools/fuzz` runs the same targets under libFuzzer and atheris for as long as one likes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fuzz import targets
from tests.fuzz.run import CORPUS, ENGINE_TARGETS
from tests.fuzz.targets import TARGETS, mutated_input, run, seeds

CHANGES = 150


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_kept_gets_an_answer(name: str) -> None:
    for path in sorted((CORPUS / name).glob("*")):
        run(name, path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_changed_seeds_get_an_answer(name: str, seed: int) -> None:
    for number, data in enumerate(seeds(name)):
        run(name, data)
        for change in range(CHANGES):
            run(name, mutated_input(name, data, 1 << 16, seed + 1000 * number + change))


def test_an_error_of_another_kind_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(data: bytes) -> object:
        return dict[bytes, int]()[data]

    monkeypatch.setitem(targets.TARGETS, "size", careless)
    monkeypatch.setitem(targets.ERRORS, careless, (ValueError,))
    with pytest.raises(KeyError):
        run("size", b"1")


def test_every_target_has_seeds() -> None:
    """And names differ, for a corpus and an artifact are called after them."""
    made: dict[str, Callable[[], object]] = dict(targets._SEEDS)
    assert set(made) == set(TARGETS)
    assert not set(ENGINE_TARGETS) & set(TARGETS)
    assert len(ENGINE_TARGETS) == 3
