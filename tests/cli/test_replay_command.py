"""`shmcache replay` as scripts and people meet it."""

import gzip
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
from shmcache.workloads.conversations import ConversationOptions, conversation_trace
from shmcache.workloads.traces import trace_line
from tests.cli.terminals import seen_on_a_terminal
from tests.support import PATIENCE_S, ROOT, wait_until

COMMAND = (sys.executable, "-m", "shmcache.cli.main", "replay")
FIELDS = (
    "requests block_hit_rate ideal_hit_rate tokens_saved evictions kills leaked_bytes wrong_bytes"
    " bytes_stored bytes_served seconds"
).split()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A file of generated chats."""
    options = ConversationOptions(seed=2, conversations=15)
    path = tmp_path / "chats.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(map(trace_line, conversation_trace(options)))))
    return str(path)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["replay", *args])


def answer(*args: str) -> Any:
    result = run(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout.splitlines()[-1])


def test_the_answer_for_scripts(trace: str, pool_name: str) -> None:
    said = answer(trace, "--name", pool_name, "--workers", "2", "--kill-after", "5")
    assert [key for key in FIELDS if key not in said] == []
    assert said["requests"] == len(gzip.decompress(Path(trace).read_bytes()).splitlines())
    assert 0 < said["block_hit_rate"] <= said["ideal_hit_rate"] < 1
    assert (said["kills"], said["wrong_bytes"], said["leaked_bytes"], said["ok"]) == (1, 0, 0, True)
    assert not segment_path(pool_name).exists()


def test_the_answer_for_people(trace: str, pool_name: str) -> None:
    said = run(trace, "--name", pool_name, "--workers", "1", "--limit", "4", "--seed", "9")
    assert said.exit_code == 0
    words = [line.split() for line in said.stdout.splitlines()]
    assert ["requests", "4"] in words
    assert ["seed", "9"] in words
    assert said.stdout.splitlines()[-1] == "every byte was right, nothing leaked"


def test_standard_input_and_a_pool_that_is_kept(trace: str, pool_name: str) -> None:
    arguments = ["-", "--name", pool_name, "--keep", "--json", "--pool-blocks", "500"]
    ran = subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        input=Path(trace).read_bytes(),
        capture_output=True,
        check=True,
    )
    assert json.loads(ran.stdout)["ok"]
    with CacheResidencyPool.observe(pool_name) as pool:
        assert pool.verify().ok
    CacheResidencyPool.destroy(pool_name)


@pytest.mark.parametrize(
    ("options", "block_bytes"),
    [
        ((), 4096),
        (("--block-bytes", "64"), 64),
        (("--bytes-per-token", "3", "--block-tokens", "512"), 1536),
        (("--geometry", "gemma-3-1b", "--limit", "2", "--pool-blocks", "20"), 26_624 * 512),
    ],
)
def test_a_block_has_the_size_that_was_asked_for(
    trace: str, pool_name: str, options: tuple[str, ...], block_bytes: int
) -> None:
    said = answer(trace, "--name", pool_name, "--workers", "1", *options)
    assert said["bytes_served"] == said["block_hits"] * block_bytes
    misses = said["block_references"] - said["block_hits"] - said["blocks_left_out"]
    assert said["bytes_stored"] == misses * block_bytes > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--geometry", "gpt-9"), "Llama-3.1-8B"),
        (("--geometry", "Mamba2-7B"), "keeps nothing per token"),
        (("--geometry", "Qwen3-8B", "--block-bytes", "64"), "one of --geometry"),
        (("--pool-bytes", "1M", "--pool-blocks", "7"), "not both"),
        (("--pool-bytes", "1M", "--block-bytes", "2M"), "would have 0 blocks of 2 MiB"),
        (("--pool-blocks", "3", "--private"), "would have 0 blocks"),
        (("--name", "n" * 100, "--private"), "a pool name has"),
        (("--policy", "best"), "policy"),
        (("--speed", "0"), "speed"),
        (("--kill-every", "nan"), "kill-every"),
        (("--speed", "inf"), "speed"),
        (("--workers", "0"), "workers"),
    ],
)
def test_a_wrong_command_line(trace: str, options: tuple[str, ...], text: str) -> None:
    said = run(trace, *options)
    assert said.exit_code == 2
    assert text in said.stderr


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"timestamp":0,"input_length":5}\nnonsense\n')
    said = run(str(path), "--workers", "1")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith("shmcache: line 2 of the trace is no request: JSON is malformed")
    said = run(str(tmp_path / "none"), "--json")
    assert said.exit_code == 1
    assert json.loads(said.stdout)["error"] == "TraceError.Unreadable"


def test_a_pool_that_does_not_fit_this_host(trace: str, pool_name: str) -> None:
    said = run(trace, "--name", pool_name, "--block-bytes", "1M", "--pool-bytes", "15TiB", "--json")
    assert said.exit_code == 1
    assert json.loads(said.stdout)["error"] == "SegmentError.NoSpace"


def test_private_pools_are_kept_by_their_names(trace: str, pool_name: str) -> None:
    said = run(trace, "--name", pool_name, "--workers", "2", "--private", "--keep", "--limit", "3")
    assert said.exit_code == 0
    for name in (f"{pool_name}-0", f"{pool_name}-1"):
        assert f"kept: pool '{name}'" in said.stdout
        CacheResidencyPool.destroy(name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_takes_everything_away(
    trace: str, pool_name: str, number: int
) -> None:
    """Also while it waits for a pipe that says nothing."""
    with subprocess.Popen(
        [*COMMAND, "-", "--name", pool_name, "--workers", "2"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdin is not None
        command.stdin.write(gzip.decompress(Path(trace).read_bytes()).splitlines(True)[0])
        command.stdin.flush()
        family = psutil.Process(command.pid)
        wait_until(lambda: len(family.children()) == 2, "the workers are started")
        children = family.children()
        command.send_signal(number)
        assert command.wait(PATIENCE_S) == 1
        assert not any(child.is_running() for child in children)
        assert not segment_path(pool_name).exists()
        assert command.stdout is not None
        assert command.stdout.read() == b""


def test_a_terminal_sees_how_far_it_is(trace: str, pool_name: str) -> None:
    """Its answer goes to standard output all the same."""
    command = [*COMMAND, trace, "--name", pool_name, "--speed", "300", "--workers", "1"]
    said, shown = seen_on_a_terminal(command)
    assert "requests" in said
    assert "of blocks hit" in shown
