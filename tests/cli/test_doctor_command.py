"""`shmcache doctor` as scripts and people meet it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shmcache.cli import doctor as module
from shmcache.cli.main import main
from shmcache.doctor import CHECKS, CheckStatus, Examination, Host, HostCheck, trials


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *args])


def answer(*args: str) -> tuple[int, Any]:
    result = run(*args, "--json")
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[CheckStatus]:
    """What the checks of this command come to, in this order."""
    statuses: list[CheckStatus] = []

    def examine(host: Host) -> Examination:
        return Examination(
            tuple(
                HostCheck(f"check{number}", status, f"found {number}", f"do {number}")
                for number, status in enumerate(statuses)
            )
        )

    monkeypatch.setattr(module, "examine_host", examine)
    return statuses


def test_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pools other tests damage meanwhile."""
    monkeypatch.setattr(trials, "segment_names", list)
    code, said = answer("--needs", "1MiB")
    assert code == 0
    assert said["ok"] is True
    assert said["needs_bytes"] == 1 << 20
    assert [check["name"] for check in said["checks"]] == list(CHECKS)
    assert {check["status"] for check in said["checks"]} <= {"ok", "note", "warn"}
    assert list(said["checks"][0]) == ["name", "status", "found", "advice"]


def test_what_no_host_has_room_for_fails() -> None:
    code, said = answer("--needs", "1EiB")
    assert code == 1
    assert said["ok"] is False
    failed = {check["name"] for check in said["checks"] if check["status"] == "fail"}
    assert {"shm_room", "memory"} <= failed


OK, NOTE, WARN, FAIL = CheckStatus


@pytest.mark.parametrize(
    ("statuses", "strict", "code"),
    [
        ([OK, NOTE], False, 0),
        ([OK, NOTE], True, 0),
        ([OK, WARN], False, 0),
        ([OK, WARN], True, 1),
        ([FAIL, OK], False, 1),
        ([FAIL, WARN], True, 1),
    ],
)
def test_exit_codes(
    found: list[CheckStatus], statuses: list[CheckStatus], strict: bool, code: int
) -> None:
    found += statuses
    said = answer(*["--strict"] * strict)
    assert (said[0], said[1]["ok"]) == (code, code == 0)


def test_the_answer_for_people(found: list[CheckStatus]) -> None:
    found += [FAIL, WARN, OK]
    said = run()
    lines = said.stdout.splitlines()
    assert said.exit_code == 1
    assert lines[1].split() == ["fail", "check0", "found", "0"]
    assert "check1: do 1" in lines
    assert lines[-1] == "fail: 1, warn: 1, note: 0, ok: 1"


def test_a_wrong_command_line() -> None:
    assert run("--needs", "lots").exit_code == 2
