"""docs/operating.md tells the truth: its keys, commands, events and refusals are the code's."""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner

from shmcache import SegmentError, SupervisorEventKind, segment_path
from shmcache.cli.main import main
from shmcache.errors import RefusedCheck
from shmcache.workloads.demo_books import DemoKill, DemoReport, DemoRow
from shmcache.workloads.replay_books import ReplayReport
from shmcache.workloads.stress import StressReport
from tests.pool.raw import Segment
from tests.support import ROOT, Worker

PAGE = (ROOT / "docs" / "operating.md").read_text()
SIZES = ("--device", "1", "--host", "0", "--transfer", "1")

# Object -> its keys, and the keys of the objects in each of its lists.
KEYS = {
    row[1]: re.findall(r"`(\w+)`", row[2])
    for row in re.finditer(r"^\| (?:`(\w+)`|an error) \| (`.*)\|$", PAGE, re.M)
    if row[1] in main.commands or row[1] is None
}


def answer(*args: str) -> Any:
    return json.loads(CliRunner().invoke(main, [*args, "--json"]).stdout)


@contextlib.contextmanager
def arena_pool(name: str) -> Iterator[str]:
    """The name of a pool with an arena."""
    answer("create", name, "--device", "1", "--host", "1M", "--transfer", "1")
    try:
        yield name
    finally:
        answer("destroy", name, "--force")


def keys(document: Any) -> list[str]:
    """As the page lists them: a list's name, then the keys of what is in it."""
    found: list[str] = []
    for key, value in document.items():
        found.append(key)
        if isinstance(value, list):
            assert value, f"nothing in {key} to compare with"
            found += value[0]
    return found


def test_the_keys_of_every_answer_are_listed(pool_name: str) -> None:
    found = {"create": answer("create", pool_name, *SIZES)}
    with Worker("import shmcache as sc") as worker:
        worker.call("pool = sc.CacheResidencyPool.attach(name)", name=pool_name)
        worker.kill()
        for command in ("list", "report", "owners", "reclaim"):
            found[command] = answer(command, *([] if command == "list" else [pool_name]))
    with Worker("import shmcache as sc") as worker, arena_pool(f"{pool_name}-arena") as arena:
        worker.call("pool = sc.CacheResidencyPool.attach(name)", name=arena)
        worker.call("lease = pool.allocate(100).publish(bytes(32)).lease")
        found["arena"] = answer("arena", arena)
    with Segment(segment_path(pool_name)) as raw:
        raw.damage_total()
    found["verify"] = answer("verify", pool_name)
    found["destroy"] = answer("destroy", pool_name)
    found["plan"], found["doctor"] = answer("plan", "smollm2-135m"), answer("doctor")
    for command, document in found.items():
        assert keys(document) == KEYS[command], command
    assert list(answer("report", pool_name)) == KEYS[None]
    assert [*StressReport.__struct_fields__, "ok"] == KEYS["stress"]
    assert [*ReplayReport.__struct_fields__, "ok"] == KEYS["replay"]
    inside = {"workers": DemoRow.__struct_fields__, "kills": DemoKill.__struct_fields__}
    demo = [key for each in DemoReport.__struct_fields__ for key in (each, *inside.get(each, ()))]
    assert [*demo, "fallback", "ok"] == KEYS["demo"]
    assert KEYS["supervise"] == ["event", "detail", "owners", *keys(found["reclaim"])[4:]]
    # Those of export are in tests/integrations. Of prompt caches, docs/persistence.md tells.
    assert set(KEYS) == {*main.commands, None} - {"prompt"}


def test_every_event_is_explained() -> None:
    events = {"watching", *(kind.value for kind in SupervisorEventKind)}
    table = PAGE.partition("| event | meaning |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == events


def test_every_refusal_is_explained() -> None:
    variants = [name for name, value in vars(SegmentError).items() if isinstance(value, type)]
    assert len(variants) > 10
    assert [name for name in variants if f"* **SegmentError.{name}**" not in PAGE] == []
    assert [check for check in get_args(RefusedCheck) if f"`{check}`" not in PAGE] == []


def commands() -> list[str]:
    """Every command line on the page; fences of shell, units and inline code alike."""
    joined = PAGE.replace("\\\n", " ")
    found = re.findall(r"(?:exec |/)?shmcache [a-z]+(?: [^`|&'\n]*)?(?=[`|&'\n])", joined)
    return [line for line in found if "..." not in line and "named" not in line]


@pytest.mark.parametrize("line", commands())
def test_every_command_line_is_right(line: str) -> None:
    words = shlex.split(line.rpartition("shmcache ")[2], comments=True)
    command = main.commands[words[0]]
    arguments = [word for word in words[1:] if word not in (">", "findings.json")]
    if arguments or not any(isinstance(p, click.Argument) for p in command.params):
        command.make_context(words[0], arguments)


def test_the_page_has_command_lines() -> None:
    assert len(commands()) > 12
