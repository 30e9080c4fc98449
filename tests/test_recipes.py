"""Pages that are followed to the letter: files parse, commands exist, every error has a row."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from shmcache import CachePoolError, SegmentError
from shmcache.cli.main import main
from shmcache.doctor import CHECKS
from tests.support import PATIENCE_S, ROOT

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("recipes", "plan", "doctor")}
PAGE = PAGES["recipes"]


def fences(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)


def titled(kind: str) -> dict[str, str]:
    """By the path in its first line, which is a comment."""
    return {text.split("\n")[0].removeprefix("# "): text for text in fences(kind)}


UNITS = titled("ini")


# ---- units --------------------------------------------------------------------------------------


def test_the_units_have_what_the_recipe_relies_on() -> None:
    parsed = {}
    for path, text in UNITS.items():
        parsed[Path(path).name] = configparser.ConfigParser(interpolation=None)
        parsed[Path(path).name].read_string(text)
    pool, worker = parsed["shmcache-llm.service"], parsed["llm-worker@.service"]
    assert worker["Unit"]["After"] == worker["Unit"]["Wants"] == "shmcache-llm.service"
    assert pool["Service"]["User"] == worker["Service"]["User"]
    assert pool["Service"]["ExecStartPre"].startswith("-")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    files = []
    for path, text in UNITS.items():
        file = tmp_path / Path(path).name
        # What is not on this machine: the programs, and their user.
        text = re.sub(r"/opt/venv/bin/\w+", sys.executable, text)
        file.write_text(text.replace("User=inference", "User=root"))
        files.append(str(file))
    ran = subprocess.run(
        ["systemd-analyze", "verify", *files],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    ours = [line for line in ran.stderr.splitlines() if str(tmp_path) in line]
    assert (ran.returncode, ours) == (0, [])


# ---- containers ---------------------------------------------------------------------------------


def documents() -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="YAML is parsed by PyYAML (extra `test`)")
    return [yaml.safe_load(text) for text in fences("yaml")]


def test_the_pod_shares_what_a_pool_needs_shared() -> None:
    pod = next(document for document in documents() if document.get("kind") == "Pod")
    spec = pod["spec"]
    assert spec["shareProcessNamespace"] is True
    assert spec["volumes"][0]["emptyDir"]["medium"] == "Memory"
    for container in spec["containers"]:
        assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
        # Folded lines are one line of shell, or the second would be a command of its own.
        assert "\n" not in container["args"][0].strip()
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"]


def test_the_compose_file_shares_it_too() -> None:
    compose = next(document for document in documents() if "services" in document)
    worker = compose["services"]["worker"]
    assert worker["ipc"] == worker["pid"] == "service:pool"
    assert compose["services"]["pool"]["ipc"] == "shareable"


# ---- commands and tables ------------------------------------------------------------------------


def commands() -> list[str]:
    """Every command line of ours, wherever it stands."""
    joined = "".join(PAGES.values()).replace("\\\n", " ").replace("\n           exec", " exec")
    found = re.findall(r"(?<![\w.-])shmcache ([a-z]+(?: [^`|&;'\"#>\]\n,]*)?)", joined)
    return [line for line in found if line.split()[0] in main.commands]


@pytest.mark.parametrize("line", commands())
def test_every_command_line_is_right(line: str) -> None:
    words = shlex.split(line)
    command = main.commands[words[0]]
    if len(words) > 1 or not any(isinstance(p, click.Argument) for p in command.params):
        command.make_context(words[0], words[1:])


def test_there_are_command_lines() -> None:
    assert len(commands()) > 25


def test_every_check_of_a_host_has_a_row() -> None:
    table = PAGES["doctor"].partition("| check | looks at |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.M) == list(CHECKS)


def test_every_error_of_a_pool_has_a_row() -> None:
    table = PAGE.partition("| error | is | do |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(?:\w+\.)?(\w+)`", table))
    for family in (CachePoolError, SegmentError):
        variants = {name for name, value in vars(family).items() if isinstance(value, type)}
        assert variants - named == set()
