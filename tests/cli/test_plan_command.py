"""`shmcache plan` as scripts and people meet it."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shmcache import CacheResidencyPool, segment_path
from shmcache.cli.main import main
from shmcache.doctor import ROOM_CHECKS
from shmcache.workloads.conversations import ConversationOptions, conversation_trace
from shmcache.workloads.traces import trace_line
from tests.support import PATIENCE_S, ROOT
from tests.workloads.configs import CONFIGS

COMMAND = (sys.executable, "-m", "shmcache.cli.main", "plan")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of generated chats."""
    options = ConversationOptions(seed=2, conversations=30)
    path = tmp_path_factory.mktemp("trace") / "chats.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(map(trace_line, conversation_trace(options)))))
    return str(path)


def run(*args: str, **settings: Any) -> Result:
    return CliRunner().invoke(main, ["plan", *args], **settings)


def answer(*args: str, code: int = 0) -> Any:
    result = run(*args, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-3.2-1b", "--context", "2000", "--requests", "3"),
        ("SmolLM2-135M", "--workers", "3", "--context", "1000"),
        ("smollm2-135m", "--arena", "77MB", "--policy", "lru"),
        ("--bytes-per-token", "100", "--block-tokens", "7", "--trace-block-tokens", "7"),
        ("deepseek-v3", "--dtype", "fp8", "--context", "5000", "--policy", "lfu"),
    ],
)
def test_the_command_it_ends_with_makes_these_bytes(
    pool_name: str, arguments: tuple[str, ...]
) -> None:
    """The promise: run what is printed, and the file has the size that was printed."""
    planned = answer(*arguments)
    words = planned["command"].split()
    assert words[:3] == ["shmcache", "create", "NAME"]
    assert run(*arguments).stdout.splitlines()[-1] == planned["command"]
    made = CliRunner().invoke(main, ["create", pool_name, *words[3:], "--json"])
    assert made.exit_code == 0
    created = json.loads(made.stdout)
    assert created["segment_bytes"] == planned["segment_bytes"]
    assert segment_path(pool_name).stat().st_size == planned["segment_bytes"]
    assert created["geometry"] == planned["geometry"]
    CacheResidencyPool.destroy(pool_name)


def test_the_answer_for_scripts(trace: str) -> None:
    said = answer("llama-3.1-8b", "--trace", trace, "--target", "0.5", "--workers", "2")
    assert (said["bytes_per_token"], said["block_bytes"]) == (131_072, 2 << 20)
    traffic = said["traffic"]
    assert said["expected_hit_rate"] == traffic["planned"]["policy_rate"] > 0.4
    assert traffic["planned"]["lru_rate"] >= 0.5
    assert said["blocks"] == max(traffic["target_blocks"], said["in_flight_blocks"])
    assert said["assumed_traffic"] is False
    assert [check["name"] for check in said["host_checks"]] == list(ROOM_CHECKS)
    assert said["fits_here"] == all(check["status"] != "fail" for check in said["host_checks"])
    assert said["host"]["memory_available_bytes"] > 0


def test_the_answer_for_people(trace: str) -> None:
    said = run("llama-3.1-8b", "--trace", trace, "--target", "0.5", "--workers", "2")
    assert said.exit_code == 0
    text = said.stdout
    assert "131,072 bytes per token, 2,097,152 (2 MiB) per block of 16 tokens" in text
    assert "2 private" in text
    assert "└──────" in text
    assert "shm_room" in text
    assert "50.00% takes" in text


def test_standard_input_is_read_as_well(trace: str) -> None:
    lines = gzip.decompress(Path(trace).read_bytes())
    arguments = ["--bytes-per-token", "64", "--trace", "-", "--policy", "lru", "--json"]
    ran = subprocess.run(
        [*COMMAND, *arguments, "--limit", "50"],
        cwd=ROOT, input=lines, capture_output=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert json.loads(ran.stdout)["traffic"]["requests"] == 50


def test_a_target_alone_is_one_of_generated_chats() -> None:
    said = answer("--bytes-per-token", "64", "--target", "0.5", "--policy", "lru")
    assert said["assumed_traffic"] is True
    assert said["traffic"]["planned"]["lru_rate"] >= 0.5
    people = run("--bytes-per-token", "64", "--target", "0.5", "--policy", "lru")
    assert "300 generated chats, no trace was given" in people.stdout


def test_the_page_shows_what_is_said_and_names_every_key() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    arguments = ("llama-3.1-8b", "--workers", "4", "--target", "0.5", "--policy", "lru")
    assert shown in run(*arguments).stdout
    listed = dict(re.findall(r"^\| (?:each of )?`(\w+)`.*? \| (`.*`) \|$", page, re.M))
    said = answer(*arguments)
    objects = {
        "traffic": said["traffic"],
        "planned": said["traffic"]["planned"],
        "samples": said["traffic"]["samples"][0],
        "host": said["host"],
    }
    for name, found in objects.items():
        assert re.findall(r"`(\w+)`", listed[name]) == list(found), name


def test_a_target_that_no_size_reaches_is_a_finding(trace: str) -> None:
    arguments = ("--bytes-per-token", "64", "--trace", trace, "--target", "1", "--policy", "lru")
    assert answer(*arguments, code=1)["traffic"]["target_blocks"] is None
    assert "no size reaches 100.00%" in run(*arguments).stdout


def test_a_plan_for_a_larger_host_is_no_finding() -> None:
    said = answer("llama-3.1-405b", "--requests", "1000", "--context", "131072")
    assert said["fits_here"] is False
    assert "it does not fit this host" in run("llama-3.1-405b", "--requests", "9999").stdout


def test_a_config_and_a_curve(tmp_path: Path, trace: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-7B"]))
    plot = tmp_path / "curve.svg"
    said = answer(str(tmp_path), "--trace", trace, "--policy", "lru", "--plot", str(plot))
    assert (said["model"], said["bytes_per_token"]) == (tmp_path.name, 57_344)
    assert plot.read_text().startswith("<svg ")
    wide = answer(str(tmp_path / "config.json"), "--dtype", "float32")
    assert wide["bytes_per_token"] == 2 * 57_344


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give a MODEL or --bytes-per-token"),
        (("gpt-9",), "'gpt-9' is none of SmolLM2-135M"),
        (("llama-3.1-8b", "--bytes-per-token", "1"), "one of the two"),
        (("--bytes-per-token", "1", "--dtype", "fp8"), "--dtype is for a MODEL"),
        (("mamba2-7b",), "nothing per token"),
        (("llama-3.1-8b", "--block-tokens", "100"), "do not divide"),
        (("llama-3.1-8b", "--target", "2"), "0<x<=1"),
        (("llama-3.1-8b", "--target", "nan"), "not a finite number"),
        (("llama-3.1-8b", "--plot", "x.svg"), "no curve to draw"),
        (("llama-3.1-8b", "--arena", "1"), "arena_bytes"),
        (("--bytes-per-token", "1", "--target", "0.1", "--plot", "x.pdf"), "not as .pdf"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...], text: str) -> None:
    said = run(*arguments)
    assert (said.exit_code, said.stdout) == (2, "")
    assert text in " ".join(said.stderr.split())
    error = answer(*arguments, code=2)
    assert error["error"] == "usage"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("./absent/config.json",), "WorkloadError.ConfigUnreadable"),
        (("llama-3.1-8b", "--trace", "absent.jsonl"), "TraceError.Unreadable"),
        (("{folder}",), "WorkloadError.ConfigUnsupported"),
        (
            ("--bytes-per-token", "1", "--target", ".1", "--policy", "lru", "--plot", "no/x.svg"),
            "SegmentError.HostError",
        ),
    ],
)
def test_a_refusal_is_exit_code_1(tmp_path: Path, arguments: tuple[str, ...], error: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    filled = [argument.format(folder=tmp_path) for argument in arguments]
    assert answer(*filled, code=1)["error"] == error
    lines = run(*filled).stderr.splitlines()
    assert lines[0].startswith("shmcache: ")


def test_a_terminal_sees_progress_and_a_narrow_one_the_curve(trace: str) -> None:
    """80 columns, as over ssh."""
    ours, theirs = pty.openpty()
    arguments = ["--bytes-per-token", "64", "--trace", trace]
    with subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
    ) as process:  # fmt: skip
        os.close(theirs)
        said = b""
        try:
            while chunk := os.read(ours, 1 << 16):
                said += chunk
        except OSError:  # how a terminal ends
            pass
        os.close(ours)
        assert process.wait(PATIENCE_S) == 0
    assert b"simulating adaptive with" in said
    assert "└───".encode() in said
