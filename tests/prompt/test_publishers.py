"""Who owns a staging directory, and publishers beside each other (persistence 7.5 and 7.6)."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
from pathlib import Path

import pytest

from shmcache import (
    PromptCachePersistenceError,
    PromptCachePublication,
    PromptCacheReader,
    inspect_prompt_cache,
)
from shmcache.policy.wire import to_wire
from tests.policy.samples import minimal
from tests.prompt.caches import expected_arrays, named, publish, read_all, tree, write_shards
from tests.support import Worker

Error = PromptCachePersistenceError
begin = PromptCachePublication.begin


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "root/cache"


# 7.5 ----------------------------------------------------------------------------------------------


def test_7_5_dropped_closed_and_left_by_an_error(cache: Path) -> None:
    publish(cache, minimal())
    before = tree(cache)
    publication = begin(cache, True)
    assert tree(cache) != before
    publication.close()
    publication.close()
    assert tree(cache) == before
    dropped = begin(cache, True)
    del dropped
    gc.collect()
    assert tree(cache) == before
    with pytest.raises(KeyError), begin(cache, True):
        raise KeyError
    assert tree(cache) == before


def test_7_5_used_up(cache: Path) -> None:
    committed = begin(cache, False)
    committed.commit(write_shards(committed.staging_directory, minimal()))
    closed = begin(cache, True)
    closed.close()
    before = tree(cache)
    for publication in (committed, closed):
        with pytest.raises(RuntimeError):
            publication.commit(minimal())
        with pytest.raises(RuntimeError):
            _ = publication.staging_directory
        publication.close()
    assert tree(cache) == before


def test_7_5_a_wrong_argument_uses_nothing_up(cache: Path) -> None:
    with begin(cache, False) as publication:
        written = write_shards(publication.staging_directory, minimal())
        with pytest.raises(TypeError):
            publication.commit(to_wire(written))
        publication.commit(written)
    assert inspect_prompt_cache(cache)


def test_7_5_no_copies(cache: Path) -> None:
    with begin(cache, False) as publication:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                duplicate(publication)


def test_7_5_only_its_own_staging_is_removed(cache: Path) -> None:
    """Somebody moved it away and put another directory there."""
    publication = begin(cache, False)
    root = publication._plan.root
    root.rename(cache.parent / "aside")
    root.mkdir()
    (root / "precious").touch()
    publication.close()
    assert (root / "precious").exists()


INHERIT = """
import os
from shmcache import PromptCachePublication
from tests.policy.samples import minimal
from tests.prompt.caches import write_shards

def inherit(path):
    publication = PromptCachePublication.begin(path, False)
    if os.fork() == 0:
        write_shards(publication.staging_directory, minimal())  # a child may do the work
        try:
            publication.commit(minimal())
        except RuntimeError:
            publication.close()
            del publication
            os._exit(7)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    publication.commit(minimal())
    return code
"""


def test_7_5_a_forked_child_owns_nothing(cache: Path) -> None:
    with Worker(INHERIT) as worker:
        assert worker.call("inherit(path)", path=str(cache)) == 7
    assert inspect_prompt_cache(cache) == minimal()


def test_7_5_an_interpreter_that_ends_discards(cache: Path) -> None:
    with Worker("import sys; from shmcache import PromptCachePublication") as worker:
        worker.call("kept = PromptCachePublication.begin(path, False)", path=str(cache))
        assert len(os.listdir(cache.parent)) == 1
        worker.begin("import os; os.close(0); os.kill(os.getpid(), 0)")
        worker.finish()
        worker._requests.close()  # the worker's loop ends, and with it the interpreter
        worker._process.wait(60)
    assert os.listdir(cache.parent) == []


# 7.6 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacing", [False, True])
def test_7_6_two_new_publications(cache: Path, replacing: bool) -> None:
    first, second = begin(cache, replacing), begin(cache, replacing)
    for publication, name in ((first, "first"), (second, "second")):
        write_shards(publication.staging_directory, named(name))
    first.commit(named("first"))
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        second.commit(named("second"))
    assert (caught.value.action, caught.value.path) == ("publish_cache", cache)
    assert isinstance(caught.value.source, OSError)
    assert caught.value.source.errno in (errno.ENOTEMPTY, errno.EEXIST)
    assert os.listdir(cache.parent) == ["cache"]
    assert inspect_prompt_cache(cache).application_namespace == "first"


def test_7_6_an_empty_directory_is_renamed_over(cache: Path) -> None:
    publication = begin(cache, False)
    written = write_shards(publication.staging_directory, minimal())
    cache.mkdir()
    publication.commit(written)
    assert inspect_prompt_cache(cache)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_7_6_something_else_took_the_name(cache: Path, kind: str) -> None:
    publication = begin(cache, False)
    written = write_shards(publication.staging_directory, minimal())
    if kind == "file":
        cache.touch()
    else:
        cache.symlink_to("nowhere")
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        publication.commit(written)
    assert caught.value == Error.Io("publish_cache", cache, NotADirectoryError(errno.ENOTDIR, ""))
    assert os.listdir(cache.parent) == ["cache"]


def test_7_6_two_replacements(cache: Path) -> None:
    publish(cache, named("old"))
    first, second = begin(cache, True), begin(cache, True)
    for publication, name in ((second, "second"), (first, "first")):
        publication.commit(write_shards(publication.staging_directory, named(name)))
        assert inspect_prompt_cache(cache).application_namespace == name
    assert len(os.listdir(cache / ".generations")) == 3


def test_7_6_a_reader_keeps_what_it_resolved(cache: Path) -> None:
    publish(cache, named("old"))
    with PromptCacheReader.open(cache) as reader:
        publish(cache, named("new"), replacing=True)
        assert read_all(reader) == expected_arrays(minimal())
        assert reader.manifest.application_namespace == "old"
