"""`shmcache prompt`: what people and scripts see of a prompt cache on disk."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from shmcache import (
    PromptCacheReader,
    prompt_cache_generations,
    resolve_prompt_cache_root,
)
from shmcache.cli.main import main
from shmcache.cli.prompt import prompt
from tests.cli.terminals import seen_on_a_terminal
from tests.prompt.caches import named, publish
from tests.support import ROOT

PAGE = (ROOT / "docs" / "persistence.md").read_text()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Three generations of the hybrid cache, 820 bytes of payload each."""
    made = tmp_path / "cache"
    for _ in range(3):
        publish(made, replacing=True)
    return made


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["prompt", *map(str, args)])


def answer(*args: object, code: int = 0) -> Any:
    result = run(*args, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_inspect(cache: Path) -> None:
    found = answer("inspect", cache)
    assert found["directory"] == str(cache)
    assert found["generation"] == resolve_prompt_cache_root(cache).name
    assert (found["blocks"], found["state_tensors"], found["shards"]) == (7, 5, 12)
    assert found["payload_bytes"] == 820
    assert found["application_namespace"] == "tests"
    text = run("inspect", cache).stdout
    assert "sample_hybrid" in text
    assert "820 B" in text


def test_verify(cache: Path) -> None:
    assert answer("verify", cache)["ok"] is True
    assert run("verify", cache).stdout == f"{cache} is sound: 820 B in 12 shards\n"
    shard = resolve_prompt_cache_root(cache) / "state-00000004.safetensors"
    flip(shard)
    assert run("inspect", cache).exit_code == 0  # reads no tensor
    error = answer("verify", cache, code=1)
    assert error["error"] == "PromptCachePersistenceError.MalformedShard"
    assert error["attributes"] == {"path": str(shard), "code": "payload_digest", "message": ""}
    result = run("verify", cache)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[1] == "  " + error["hint"]


def test_list_and_prune(cache: Path) -> None:
    kinds = ["active", "replaced", "replaced"]
    assert [one["kind"] for one in answer("list", cache)["generations"]] == kinds
    assert run("list", cache).stdout.count("replaced") == 2
    planned = answer("prune", cache, "--dry-run")
    assert (planned["dry_run"], len(planned["removed"])) == (True, 2)
    assert len(prompt_cache_generations(cache)) == 3
    assert len(answer("prune", cache, "--keep", 1)["removed"]) == 1
    with PromptCacheReader.open(cache):
        publish(cache, named("new"), replacing=True)
        assert "freed" in run("prune", cache).stdout  # one nobody holds
        assert run("prune", cache).stdout == "nothing to remove\n"
    freed = answer("prune", cache)
    assert freed["freed_bytes"] == sum(one["size_bytes"] for one in freed["removed"]) > 0
    assert [one["kind"] for one in answer("list", cache)["generations"]] == ["active"]


def test_nothing_there(tmp_path: Path) -> None:
    assert run("list", tmp_path / "missing").stdout == "no generations\n"
    assert run("prune", tmp_path / "missing").stdout == "nothing to remove\n"
    for command in ("inspect", "verify"):
        error = answer(command, tmp_path / "missing", code=1)
        assert error["attributes"]["code"] == "current_missing"


def test_a_wrong_command_line(tmp_path: Path) -> None:
    for args in (("prune", tmp_path, "--keep", "-1"), ("verify",), ("colour", tmp_path), ()):
        assert run(*args).exit_code == 2
    assert answer("verify", code=2)["hint"] == "see shmcache prompt verify --help"


@pytest.mark.parametrize("command", sorted(prompt.commands))
def test_help_teaches_by_an_example_that_parses(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    words = result.stdout.partition("Example:\n")[2].splitlines()[0].split()
    assert words[:3] == ["shmcache", "prompt", command]
    prompt.commands[command].make_context(command, words[3:])


def test_the_keys_of_every_answer_are_listed(cache: Path) -> None:
    listed = {
        row[1]: re.findall(r"`(\w+)`", row[2])
        for row in re.finditer(r"^\| `(\w+)` \| (`.*)\|$", PAGE, re.M)
        if row[1] in prompt.commands
    }
    assert set(listed) == set(prompt.commands)
    for command in ("inspect", "verify", "list", "prune"):
        document = answer(command, cache)
        keys: list[str] = []
        for key, value in document.items():
            keys.append(key)
            keys += value[0] if isinstance(value, list) else []
        assert keys == listed[command], command


def test_a_terminal_sees_how_far_it_is(cache: Path) -> None:
    """And a pipe sees nothing of that."""
    command = [sys.executable, "-m", "shmcache.cli.main", "prompt", "verify", str(cache)]
    said, shown = seen_on_a_terminal(command)
    assert "verifying" in shown
    assert said == f"{cache} is sound: 820 B in 12 shards\n"
    quiet = subprocess.run(command, capture_output=True, cwd=ROOT, check=True)
    assert quiet.stderr == b""


def test_the_group_is_a_command_of_shmcache() -> None:
    assert isinstance(main.commands["prompt"], click.Group)
