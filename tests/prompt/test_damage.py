"""Whatever happens to the bytes of a cache, no wrong tensor comes out of it, and no code runs."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmcache import (
    PromptCacheError,
    PromptCacheManifest,
    PromptCachePersistenceError,
    PromptCacheReader,
    inspect_prompt_cache,
    resolve_prompt_cache_root,
    verify_prompt_cache,
)
from tests.policy.samples import PREFIX, descriptor_of, hybrid, minimal
from tests.prompt.caches import by_hand, expected_arrays, publish, read_all, tree
from tests.support import Worker

Refusal = PromptCachePersistenceError | PromptCacheError
PREFIXES = {"demo": (5, 6, 7), "sample": PREFIX}


def load(cache: Path, manifest: PromptCacheManifest) -> dict[str, bytes]:
    """What a consumer does that expects this very cache."""
    with PromptCacheReader.open(cache) as reader:
        prefix = PREFIXES[manifest.model_family]
        reader.manifest.validate_compatibility(descriptor_of(manifest), prefix)
        assert reader.manifest.block_size_tokens == manifest.block_size_tokens
        return read_all(reader)


def files(cache: Path) -> list[Path]:
    return [cache / path for path in tree(cache) if not path.endswith("/")]


def survivors(cache: Path, manifest: PromptCacheManifest, every: int = 1) -> list[str]:
    """Flip each bit of each file; which flips were not refused."""
    found = []
    for path in files(cache):
        whole = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            for place in range(0, len(whole) * 8, every):
                byte, bit = divmod(place, 8)
                os.pwrite(file.fileno(), bytes([whole[byte] ^ 1 << bit]), byte)
                try:
                    load(cache, manifest)
                    found.append(f"{path.name} byte {byte} bit {bit}")
                except (PromptCachePersistenceError, PromptCacheError):
                    pass
                os.pwrite(file.fileno(), whole[byte : byte + 1], byte)
    return found


def test_every_single_bit_flip_is_refused(memory_path: Path) -> None:
    manifest = publish(memory_path / "cache", minimal())
    assert len(files(memory_path / "cache")) == 4
    assert survivors(memory_path / "cache", manifest) == []
    assert load(memory_path / "cache", manifest) == expected_arrays(manifest)


@pytest.mark.parametrize(
    "every", [39, pytest.param(1, marks=[pytest.mark.ci, pytest.mark.watchdog(600)])]
)
def test_every_single_bit_flip_of_a_hybrid_cache(memory_path: Path, every: int) -> None:
    manifest = publish(memory_path / "cache")
    assert len(files(memory_path / "cache")) == 15
    assert survivors(memory_path / "cache", manifest, every) == []


def test_without_the_hashes_flips_would_pass(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant that this file must notice."""
    manifest = publish(memory_path / "cache", minimal())
    monkeypatch.setattr("shmcache.prompt.reading._compare_digest", lambda *_: None)
    left = survivors(memory_path / "cache", manifest, 7)
    assert left
    assert {name.partition(" ")[0] for name in left} <= {"manifest.json", "manifest.sha256"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_any_file(memory_path: Path, data: st.DataObject) -> None:
    """Cut, overwritten, inserted into, swapped with another: refused, or the right bytes."""
    cache = memory_path / "cache"
    if not cache.exists():
        publish(cache)
    manifest = PromptCacheManifest.from_json(
        (resolve_prompt_cache_root(cache) / "manifest.json").read_bytes()
    )
    path = data.draw(st.sampled_from(files(cache)))
    whole = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "write", "insert", "swap"]))
    place = data.draw(st.integers(0, len(whole)))
    junk = data.draw(st.binary(max_size=40))
    changed = {
        "cut": whole[:place],
        "write": whole[:place] + junk + whole[place + len(junk) :],
        "insert": whole[:place] + junk + whole[place:],
        "swap": data.draw(st.sampled_from(files(cache))).read_bytes(),
    }[kind]
    try:
        path.write_bytes(changed)
        found = load(cache, manifest)
    except (PromptCachePersistenceError, PromptCacheError):
        assert changed != whole
    else:
        assert found == expected_arrays(manifest)
    finally:
        path.write_bytes(whole)


def test_a_block_of_equal_shape(memory_path: Path) -> None:
    """Only the hash tells one block from another."""
    cache = memory_path / "cache"
    manifest = publish(cache)
    one, other = manifest.blocks[1], manifest.blocks[2]
    assert (one.first_shape, one.second_shape) == (other.first_shape, other.second_shape)
    generation = resolve_prompt_cache_root(cache)
    content = bytearray((generation / one.shard).read_bytes())
    content[-1] ^= 1
    (generation / other.shard).write_bytes(content)
    assert inspect_prompt_cache(cache) == manifest
    with pytest.raises(PromptCachePersistenceError.MalformedShard, match="payload_digest"):
        verify_prompt_cache(cache)


def test_a_huge_sparse_shard(memory_path: Path) -> None:
    """O12 the other way: a file of a TiB that agrees with its header costs no memory to refuse."""
    cache = memory_path / "cache"
    publish(cache, minimal())
    shard = resolve_prompt_cache_root(cache) / "block-00000000.safetensors"
    os.truncate(shard, 1 << 40)
    tracemalloc.start()
    works: list[Any] = [inspect_prompt_cache, verify_prompt_cache, PromptCacheReader.open]
    for work in works:
        with pytest.raises(PromptCachePersistenceError.MalformedShard, match="file_boundary"):
            work(cache)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


def test_verifying_needs_memory_for_no_shard(memory_path: Path) -> None:
    cache = memory_path / "cache"
    big = replace(
        minimal().blocks[0],
        end=4,
        first_shape=(1, 1, 4, 1 << 20),
        second_shape=(1, 1, 4, 1 << 20),
        logical_bytes=1 << 25,
        first_dtype="Float32",
    )
    document = json.loads(minimal().to_json())
    document["total_prefix_tokens"] = 4
    document["layer_layout"][0]["key_value"]["head_dim"] = 1 << 20
    made = replace(PromptCacheManifest.from_document(document), blocks=(big,))
    publish(cache, made)
    tracemalloc.start()
    verify_prompt_cache(cache)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


# No pickle ----------------------------------------------------------------------------------------

AUDIT = """
import os, sys
import numpy, ml_dtypes
from shmcache import *
from tests.prompt.caches import publish, read_all
from tests.policy.samples import minimal

seen = []
WATCHED = ("pickle.", "marshal.", "exec", "compile", "import", "os.system", "subprocess.",
           "os.exec", "os.posix_spawn", "code.", "ctypes.dlopen", "socket.")

def load(path):
    with PromptCacheReader.open(path) as reader:
        return read_all(reader) and None

def attempt(path):
    'Every way into a cache; what they said.'
    said = []
    for work in (load, inspect_prompt_cache, verify_prompt_cache, resolve_prompt_cache_root,
                 prompt_cache_generations):
        try:
            work(path)
            said.append("")
        except PromptCachePersistenceError as error:
            said.append(type(error).__name__)
    return said

def watch():
    sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(WATCHED) else None)
"""

STREAM = b"cposix\nsystem\n(S'true'\ntR."  # runs a program when unpickled


def test_a_pickle_anywhere_runs_nothing(tmp_path: Path) -> None:
    """C65: with an audit hook on unpickling, imports, execution and programs."""
    whole = publish(tmp_path / "whole")
    names = sorted(path.relative_to(tmp_path / "whole") for path in files(tmp_path / "whole"))
    with Worker(AUDIT) as worker:
        worker.call("publish(path); attempt(path); watch()", path=str(tmp_path / "first"))
        worker.call("publish(path)", path=str(tmp_path / "second"))  # what writes is watched too
        assert worker.call("attempt(path)", path=str(tmp_path / "whole")) == [""] * 5
        for name in names:
            content = (tmp_path / "whole" / name).read_bytes()
            (tmp_path / "whole" / name).write_bytes(STREAM)
            said = worker.call("attempt(path)", path=str(tmp_path / "whole"))
            assert said[0], name
            (tmp_path / "whole" / name).write_bytes(content)
        seen = worker.call("[one for one in seen if one not in ('compile', 'exec')]")
        steps = worker.call("seen.count('exec')")
        worker.call("import pickle; pickle.loads(b'cos\\ngetpid\\n(tR.')")
        assert worker.call("'pickle.find_class' in seen")  # the hook would have noticed
    # The worker's own loop compiles and executes one step per call, and imports nothing.
    assert seen == []
    assert steps <= 2 * (len(names) + 4)
    assert load(tmp_path / "whole", whole) == expected_arrays(whole)


def test_nothing_of_ours_imports_pickle() -> None:
    """`tests/test_tidy.py` forbids it in the sources; this is what came in by other ways."""
    with Worker("import sys; before = set(sys.modules); import shmcache.prompt.reading") as worker:
        mine = worker.call("[name for name in sys.modules if name.startswith('shmcache.prompt')]")
        assert len(mine) > 5
        assert (
            worker.call("[name for name in mine if 'pickle' in vars(sys.modules[name])]", mine=mine)
            == []
        )


def test_a_pickle_in_place_of_the_manifest(tmp_path: Path) -> None:
    by_hand(tmp_path / "cache", STREAM)
    with pytest.raises(PromptCachePersistenceError.ManifestJson):
        inspect_prompt_cache(tmp_path / "cache")
    assert "posix" not in sys.argv


def test_the_hybrid_cache_is_what_these_tests_think() -> None:
    kinds: Any = {block.representation for block in hybrid().blocks}
    assert len(kinds) == 2
    assert len({tensor.dtype for tensor in hybrid().state_tensors}) == 3
