"""A publication in two phases, which can be taken back (persistence 10)."""

from __future__ import annotations

import copy
import gc
import os
import re
import shutil
from pathlib import Path

import pytest

from shmcache import (
    PromptCachePersistenceError,
    PromptCacheReader,
    ReversiblePromptCachePublication,
    inspect_prompt_cache,
    prune_prompt_cache,
)
from shmcache.prompt import generations
from tests.policy.samples import minimal
from tests.prompt.caches import expected_arrays, named, publish, read_all, tree
from tests.support import Worker

Error = PromptCachePersistenceError
begin = ReversiblePromptCachePublication.begin


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    made = tmp_path / "root/cache"
    made.parent.mkdir()
    return made


def staged(cache: Path, replacing: bool, name: str = "new") -> ReversiblePromptCachePublication:
    """A reversible publication whose transaction directory is complete."""
    publication = begin(cache, replacing)
    publish(publication.transaction_directory, named(name))
    return publication


def label(cache: Path) -> str | None:
    return inspect_prompt_cache(cache).application_namespace


def refused(work: object) -> PromptCachePersistenceError:
    assert callable(work)
    with pytest.raises(PromptCachePersistenceError) as caught:
        work()
    return caught.value


def test_10_the_name_is_reserved_and_not_made(cache: Path) -> None:
    one, two = begin(cache, False), begin(cache, False)
    assert one.transaction_directory != two.transaction_directory
    assert one.transaction_directory.parent == cache.parent
    pattern = r"\.cache\.transaction-p[0-9a-f]{8}-[0-9a-f]{32}"
    assert re.fullmatch(pattern, one.transaction_directory.name)
    assert f"-p{os.getpid():08x}-" in one.transaction_directory.name
    assert os.listdir(cache.parent) == []


def test_10_begin_refuses_as_an_ordinary_one(cache: Path) -> None:
    cache.mkdir()
    assert refused(lambda: begin(cache, False)) == Error.PromptCacheExists(cache)
    cache.rmdir()
    cache.touch()
    assert refused(lambda: begin(cache, True)) == Error.InvalidPromptCachePath(cache)


def test_10_a_new_cache_kept(cache: Path) -> None:
    with staged(cache, False) as publication:
        assert not cache.exists()
        publication.publish()
        assert label(cache) == "new"
        publication.commit()
    assert label(cache) == "new"
    assert os.listdir(cache.parent) == ["cache"]


def test_10_a_new_cache_taken_back(cache: Path) -> None:
    publication = staged(cache, False)
    publication.publish()
    publication.rollback()
    assert os.listdir(cache.parent) == []


def test_10_a_replacement_kept(cache: Path) -> None:
    publish(cache, named("old"))
    publication = staged(cache, True)
    publication.publish()
    assert label(cache) == "new"
    publication.commit()
    assert label(cache) == "new"
    assert len(os.listdir(cache / ".generations")) == 2
    assert os.listdir(cache.parent) == ["cache"]


def test_10_a_replacement_taken_back(cache: Path) -> None:
    publish(cache, named("old"))
    before = tree(cache)
    publication = staged(cache, True)
    publication.publish()
    publication.rollback()
    assert tree(cache) == before
    assert label(cache) == "old"
    assert os.listdir(cache.parent) == ["cache"]


def test_10_a_directory_without_a_pointer(cache: Path) -> None:
    cache.mkdir()
    publication = staged(cache, True)
    publication.publish()
    assert label(cache) == "new"
    publication.rollback()
    assert tree(cache) == [".generations/"]


@pytest.mark.parametrize("published", [False, True])
def test_10_dropping_rolls_back(cache: Path, published: bool) -> None:
    publish(cache, named("old"))
    before = tree(cache.parent)
    publication = staged(cache, True)
    if published:
        publication.publish()
    del publication
    gc.collect()
    assert tree(cache.parent) == before


def test_10_wrong_states(cache: Path) -> None:
    def wrong(operation: str, state: str) -> PromptCachePersistenceError:
        return Error.InvalidReversiblePublication(operation, state)

    publication = staged(cache, False)
    assert refused(publication.commit) == wrong("commit", "reserved")
    publication.publish()
    assert refused(publication.publish) == wrong("publish", "published")
    publication.commit()
    for name in ("publish", "commit", "rollback"):
        assert refused(getattr(publication, name)) == wrong(name, "ended")
    publication.close()
    assert label(cache) == "new"
    with pytest.raises(TypeError):
        copy.copy(publication)


def test_10_nothing_was_staged(cache: Path) -> None:
    publication = begin(cache, False)
    assert refused(publication.publish) == Error.MalformedStorage("current_missing")
    publish(publication.transaction_directory, named("late"))
    publication.publish()  # it was still reserved
    publication.commit()
    assert label(cache) == "late"


def test_10_the_destination_came_up_meanwhile(cache: Path) -> None:
    publication = staged(cache, False)
    publish(cache, named("other"))
    assert refused(publication.publish) == Error.PromptCacheExists(cache)
    publication.rollback()
    assert label(cache) == "other"
    assert os.listdir(cache.parent) == ["cache"]


def test_10_the_generation_exists(cache: Path) -> None:
    publish(cache, named("old"))
    publication = staged(cache, True)
    (name,) = os.listdir(publication.transaction_directory / ".generations")
    target = cache / ".generations" / name
    target.mkdir()
    assert refused(publication.publish) == Error.InvalidPromptCachePath(target)
    target.rmdir()
    publication.publish()
    assert label(cache) == "new"
    publication.commit()


def test_10_both_generations_are_held_until_the_end(cache: Path) -> None:
    publish(cache, named("old"))
    publication = staged(cache, True)
    publication.publish()
    assert prune_prompt_cache(cache) == ()
    publication.rollback()
    assert label(cache) == "old"


def test_10_somebody_else_published_since(cache: Path) -> None:
    publish(cache, named("old"))
    publication = staged(cache, True)
    publication.publish()
    publish(cache, named("third"), replacing=True)
    publication.rollback()
    assert label(cache) == "third"
    assert len(os.listdir(cache / ".generations")) == 2
    new = staged(cache.with_name("new"), False)
    new.publish()
    publish(cache.with_name("new"), named("third"), replacing=True)
    new.rollback()
    assert label(cache.with_name("new")) == "third"
    assert len(os.listdir(cache.with_name("new") / ".generations")) == 1


def test_10_readers_keep_what_was_rolled_back(cache: Path) -> None:
    """G10: a generation that is read is left to prune."""
    publish(cache, named("old"))
    publication = staged(cache, True)
    publication.publish()
    with PromptCacheReader.open(cache) as reader:
        publication.rollback()
        assert label(cache) == "old"
        assert read_all(reader) == expected_arrays(minimal())
    assert len(prune_prompt_cache(cache)) == 1
    fresh = cache.with_name("fresh")
    publication = staged(fresh, False)
    publication.publish()
    with PromptCacheReader.open(fresh) as reader:
        publication.rollback()
        assert not fresh.exists()
        assert read_all(reader) == expected_arrays(minimal())
    assert publication.transaction_directory.exists()
    shutil.rmtree(publication.transaction_directory)


@pytest.mark.parametrize("call", ["rename", "fsync"])
@pytest.mark.parametrize("existing", [False, True])
def test_10_publish_fails_at_any_step(
    cache: Path, monkeypatch: pytest.MonkeyPatch, call: str, existing: bool
) -> None:
    """Readers find the old content, or the new one whole; then it can be taken back."""
    real = getattr(os, call)
    nth = 0
    while True:
        if existing:
            publish(cache, named("old"))
        publication = staged(cache, existing)
        before = tree(cache.parent)
        count = 0

        def fail(*arguments: object, at: int = nth, **more: object) -> None:
            nonlocal count
            count += 1
            if count == at + 1:
                raise OSError(5, "gone")
            real(*arguments, **more)

        monkeypatch.setattr(os, call, fail)
        try:
            publication.publish()
            break
        except PromptCachePersistenceError.Io as error:
            visible = bool(getattr(error, "__notes__", ()))
        finally:
            monkeypatch.undo()
        assert visible == (cache.exists() and label(cache) == "new")
        assert visible or tree(cache.parent) == before
        publication.rollback()
        assert (label(cache) if existing else cache.exists()) == ("old" if existing else False)
        shutil.rmtree(cache, ignore_errors=True)
        nth += 1
    assert nth >= (2 if existing else 1)
    publication.commit()
    assert label(cache) == "new"


def test_10_a_name_of_another_shape_is_restored(cache: Path) -> None:
    """No prefix is demanded of the name that was active before."""
    publish(cache, named("old"))
    (name,) = os.listdir(cache / ".generations")
    (cache / ".generations" / name).rename(cache / ".generations/x1")
    (cache / "CURRENT").write_text("x1\n")
    publication = staged(cache, True)
    publication.publish()
    publication.rollback()
    assert (cache / "CURRENT").read_text() == "x1\n"
    assert label(cache) == "old"


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("existing", [False, True])
def test_a_prune_spares_the_transaction_of_the_living(
    cache: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, runs: bool
) -> None:
    """Held from the inner commit on: also where its process cannot be seen."""
    monkeypatch.setattr(generations, "_runs", lambda pid: runs)
    if existing:
        publish(cache, named("old"))
    publication = staged(cache, existing)
    assert prune_prompt_cache(cache) == ()
    assert publication.transaction_directory.exists()
    publication.publish()
    prune_prompt_cache(cache)
    assert label(cache) == "new"
    publication.rollback()
    assert os.listdir(cache.parent) == (["cache"] if existing else [])
    if existing:
        assert label(cache) == "old"


def test_a_prune_collects_the_transaction_of_the_killed(cache: Path) -> None:
    code = """
from shmcache import ReversiblePromptCachePublication
from tests.policy.samples import minimal
from tests.prompt.caches import named, publish

def stage(cache):
    global publication
    publication = ReversiblePromptCachePublication.begin(cache, True)
    publish(publication.transaction_directory, named("new"))
"""
    publish(cache, named("old"))
    with Worker(code) as worker:
        worker.call("stage(cache)", cache=str(cache))
        assert prune_prompt_cache(cache) == ()
        assert len(os.listdir(cache.parent)) == 2
        worker.kill()
    foreign = cache.with_name(".cache.transaction-of-mine")
    foreign.mkdir()
    (removed,) = prune_prompt_cache(cache)
    assert removed.kind.value == "staging"
    assert sorted(os.listdir(cache.parent)) == [foreign.name, "cache"]
    assert label(cache) == "old"
