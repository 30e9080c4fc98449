"""C62: a power loss at any point, with any part of what was not synced.

Before `commit` returned: the old content or the new, whole. After: the new. Each fsync is taken
away once, and then some state is neither.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache import PromptCachePersistenceError, PromptCacheReader, prune_prompt_cache
from shmcache.prompt import files, generations, publication, shard
from tests.policy.samples import minimal
from tests.prompt.caches import expected_arrays, named, publish, read_all
from tests.prompt.power_loss import Change, Tree, crash_points, read_tree, recording, write_tree

Outcome = str | None


def outcome(cache: Path) -> Outcome:
    """The label of what a reader finds; None for nothing, "damaged" for what must not be."""
    try:
        with PromptCacheReader.open(cache) as reader:
            assert read_all(reader) == expected_arrays(minimal())
            return reader.manifest.application_namespace
    except PromptCachePersistenceError as error:
        if error == PromptCachePersistenceError.MalformedStorage("current_missing"):
            return None
        return f"damaged: {error}"


def record(root: Path, old: str | None, prune: bool) -> tuple[list[Change], int]:
    """The changes of a publication, and how many of them the old content is made of."""
    cache = root / "parent/cache"
    with recording(root) as changes:
        if old:
            publish(cache, named(old))
        skipped = len(changes)
        publish(cache, named("new"), replacing=bool(old))
        committed = len(changes)
        if prune:
            prune_prompt_cache(cache)
            skipped = committed
    return list(changes), skipped


def outcomes(
    folder: Path, changes: list[Change], skipped: int, rng: random.Random
) -> Iterator[tuple[int, Outcome]]:
    """Of every distinct state: after how many changes, and what a reader finds in it."""
    judged: dict[Tree, Outcome] = {}
    for number, trees in crash_points(changes, rng, skipped):
        for tree in trees:
            if tree not in judged:
                write_tree(folder / "after", tree)
                judged[tree] = outcome(folder / "after/parent/cache")
                shutil.rmtree(folder / "after")
            yield number, judged[tree]


def test_the_record_is_complete(memory_path: Path, rng: random.Random) -> None:
    """Played back, it gives what is on the disk."""
    root = memory_path / "root"
    root.mkdir()
    changes, _ = record(root, "old", prune=True)
    *_, (number, trees) = crash_points(changes, rng, len(changes))
    assert number == len(changes)
    assert read_tree(root) in trees
    assert {change.call for change in changes} >= {"create", "mkdir", "write", "sync", "rename"}


@pytest.mark.parametrize("old", [None, "old"], ids=["new", "replacement"])
def test_a_power_loss_anywhere(memory_path: Path, rng: random.Random, old: str | None) -> None:
    root = memory_path / "root"
    root.mkdir()
    changes, skipped = record(root, old, prune=False)
    found: dict[Outcome, int] = {}
    for number, what in outcomes(memory_path, changes, skipped, rng):
        allowed = {"new"} if number == len(changes) else {old, "new"}
        assert what in allowed, (number, changes[number - 1])
        found[what] = found.get(what, 0) + 1
    assert set(found) == {old, "new"}
    assert sum(found.values()) > 50


def test_a_power_loss_while_pruning(memory_path: Path, rng: random.Random) -> None:
    root = memory_path / "root"
    root.mkdir()
    changes, skipped = record(root, "old", prune=True)
    assert any(change.call == "remove" for change in changes[skipped:])
    assert {what for _, what in outcomes(memory_path, changes, skipped, rng)} == {"new"}


def forget(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    monkeypatch.setattr(where, name, lambda *_: None)


@pytest.mark.parametrize("old", [None, "old"], ids=["new", "replacement"])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        (shard, "sync_file"),
        (publication, "sync_file"),
        (publication, "sync_directory"),
        (publication, "_sync_tree"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_without_an_fsync_it_shows(
    memory_path: Path,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    old: str | None,
) -> None:
    root = memory_path / "root"
    root.mkdir()
    forget(monkeypatch, where, name)
    changes, skipped = record(root, old, prune=False)
    found = set(outcomes(memory_path, changes, skipped, rng))
    assert any(
        what not in ({"new"} if number == len(changes) else {old, "new"}) for number, what in found
    )


@pytest.mark.parametrize("mutant", [False, True])
def test_prune_makes_a_pointer_durable_that_its_publisher_could_not(
    memory_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, mutant: bool
) -> None:
    """The last fsync of a publication failed: its content is visible, and may go with the power."""
    root = memory_path / "root"
    cache = root / "parent/cache"
    root.mkdir()
    real = files.sync_directory

    def fail_late(path: Path) -> None:
        if path == cache:
            raise PromptCachePersistenceError.Io("sync_directory", path, OSError(5, "gone"))
        real(path)

    with recording(root) as changes:
        publish(cache, named("old"))
        with monkeypatch.context() as patch, contextlib.suppress(PromptCachePersistenceError.Io):
            patch.setattr(publication, "sync_directory", fail_late)
            publish(cache, named("new"), replacing=True)
        skipped = len(changes)
        with monkeypatch.context() as patch:
            if mutant:
                forget(patch, generations, "sync_directory")
            assert len(prune_prompt_cache(cache)) == 1
    found = {what for _, what in outcomes(memory_path, list(changes), skipped, rng)}
    if mutant:
        assert any(str(what).startswith("damaged") for what in found)
    else:
        assert found == {"old", "new"}
