"""The commands as people and scripts meet them: answers, exit codes, errors, what is listed."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shmcache import CachePoolError, CachePoolLimits, CacheResidencyPool, segment_path
from shmcache.cli.answers import error_document
from shmcache.cli.main import main
from tests.pool.raw import Segment
from tests.support import SHM, Worker

SIZES = ("--device", "1GiB", "--host", "32KiB", "--transfer", "1MB", "--disk", "5T")
LIMITS = CachePoolLimits(1 << 30, 32 << 10, 1_000_000, 5 << 40)
COMMANDS = sorted(main.commands)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def answer(*args: str, code: int = 0) -> Any:
    """The one line of JSON that a command answers, whatever its exit code."""
    result = run(*args, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def refusal(*args: str) -> list[str]:
    """The lines on stderr of a command that is refused."""
    result = run(*args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert isinstance(result.exception, SystemExit)
    return result.stderr.splitlines()


@pytest.fixture
def pool(pool_name: str) -> str:
    """The name of a pool made by the command."""
    assert run("create", pool_name, *SIZES).exit_code == 0
    return pool_name


def attached(name: str) -> Worker:
    """An owner that holds 5 device bytes by a reservation and 7 host bytes by a manager."""
    worker = Worker("import shmcache as sc")
    worker.call(
        "pool = sc.CacheResidencyPool.attach(name)\n"
        "token = pool.reserve(sc.CachePoolUsage(device_bytes=5))\n"
        "member = pool.register_manager(None)\n"
        "pool.update_manager(member.manager, sc.CachePoolUsage(host_bytes=7))",
        name=name,
    )
    return worker


# ---- create and destroy ------------------------------------------------------------------------


def test_create_makes_the_pool_that_was_asked_for(pool_name: str) -> None:
    made = answer(
        "create", pool_name, *SIZES, "--mode", "660", "--owners-max", "3", "--managers-max", "4",
        "--reservations-max", "5",
    )  # fmt: skip
    with CacheResidencyPool.observe(pool_name) as found:
        geometry = found.geometry()
        assert geometry.limits == LIMITS
        assert (geometry.owners_max, geometry.managers_max, geometry.reservations_max) == (3, 4, 5)
        assert made["pool_id"] == f"{found.id:016x}"
        assert made["segment_bytes"] == segment_path(pool_name).stat().st_size
        assert found.owners() == ()
    assert made["geometry"]["limits"]["disk_bytes"] == 5 << 40
    assert (geometry.mode, made["geometry"]["mode"]) == (0o660, "660")


def test_create_refuses_a_name_that_exists(pool: str) -> None:
    assert refusal("create", pool, *SIZES) == [
        f"shmcache: a pool named {pool!r} exists",
        "  attach to it, open_or_create, or destroy it first",
    ]


def test_create_accepts_what_exists_only_with_the_same_sizes(pool: str) -> None:
    first = answer("report", pool)["pool_id"]
    assert answer("create", pool, *SIZES, "--exist-ok")["pool_id"] == first
    error = answer("create", pool, *SIZES[:-1], "6T", "--exist-ok", code=1)
    assert (error["error"], error["attributes"]["check"]) == ("SegmentError.Refused", "limits")
    assert error["attributes"]["expected"]["disk_bytes"] == 6 << 40


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (("--device", "12 parsecs"), "'parsecs' in '12 parsecs' is not a unit"),
        (("--device", "0"), "device_bytes_zero"),
        (("--host", "0", "--arena", "100T"), "arena_bytes must be between"),
        (("--owners-max", "1025"), "1<=x<=1024"),
        (("--mode", "666"), "'660'"),
        (("--colour",), "No such option"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    pool_name: str, changed: tuple[str, ...], text: str
) -> None:
    result = run("create", pool_name, *SIZES, *changed)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr
    error = answer("create", pool_name, *SIZES, *changed, code=2)
    assert (error["error"], error["hint"]) == ("usage", "see shmcache create --help")
    assert text in error["message"]
    assert not segment_path(pool_name).exists()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "ä", "n" * 101])
def test_what_cannot_name_a_pool_is_a_wrong_command_line(name: str) -> None:
    assert run("report", name).exit_code == 2


def test_a_name_may_begin_with_a_dash(pool_name: str) -> None:
    name = f"-{pool_name}"
    assert run("create", *SIZES, "--", name).exit_code == 0
    assert json.loads(run("report", "--json", "--", name).stdout)["name"] == name
    # What follows the dashes is a name, not a wish for JSON.
    assert run("destroy", "--", "--json").stderr.startswith("shmcache: no pool is named '--json'")
    assert run("destroy", "--", name).exit_code == 0


def test_destroy_refuses_what_is_in_use(pool: str) -> None:
    with attached(pool) as worker:
        assert answer("destroy", pool, code=1)["attributes"] == {"owners": [worker.pid]}
        assert str(worker.pid) in refusal("destroy", pool)[0]
        assert answer("destroy", pool, "--force") == {"name": pool, "destroyed": True}
    assert not segment_path(pool).exists()


@pytest.mark.parametrize("command", ["report", "owners", "verify", "reclaim", "destroy"])
def test_a_pool_that_does_not_exist_is_refused(pool_name: str, command: str) -> None:
    assert refusal(command, pool_name) == [
        f"shmcache: no pool is named {pool_name!r}",
        "  `shmcache list` shows what exists, `create` makes one",
    ]
    assert answer(command, pool_name, code=1) == {
        "error": "SegmentError.NotFound",
        "message": f"no pool is named {pool_name!r}",
        "hint": "`shmcache list` shows what exists, `create` makes one",
        "attributes": {"name": pool_name},
    }


# ---- looking -----------------------------------------------------------------------------------


def test_report_shows_what_is_held(pool: str) -> None:
    with attached(pool):
        found = answer("report", pool)
        text = run("report", pool).stdout
    assert found["axes"]["device"] == {
        "current_bytes": 5,
        "peak_bytes": 5,
        "limit_bytes": LIMITS.device_bytes,
    }
    assert found["axes"]["host"]["current_bytes"] == 7
    assert [found[key] for key in ("owners", "managers", "reservations")] == [1, 1, 1]
    assert "device                  5 B   5 B      1 GiB\n" in text
    assert "\x1b" not in text


def test_owners_shows_who_holds_what_until_reclaim_gives_it_back(pool: str) -> None:
    with attached(pool) as worker:
        [owner] = answer("owners", pool)["owners"]
        assert (owner["pid"], owner["verdict"]) == (worker.pid, "alive")
        assert (owner["usage"]["device_bytes"], owner["usage"]["host_bytes"]) == (5, 7)
        assert "python" in owner["command"]
        assert answer("reclaim", pool)["reclaimed"] == []
        worker.kill()
        assert "dead" in run("owners", pool).stdout
        [reclaimed] = answer("reclaim", pool)["reclaimed"]
        assert reclaimed["pid"] == worker.pid
        assert reclaimed["nonce"] == owner["nonce"]
        assert (reclaimed["entries"], reclaimed["usage"]) == (2, owner["usage"])
    assert run("reclaim", pool).stdout == "nothing to reclaim\n"
    assert run("owners", pool).stdout == "no owners\n"
    assert answer("report", pool)["axes"]["device"]["current_bytes"] == 0


def test_reclaim_says_what_it_gave_back(pool: str) -> None:
    with attached(pool) as worker:
        worker.kill()
        lines = run("reclaim", pool).stdout.splitlines()
    assert lines[1].split() == [str(worker.pid), "2", "5", "B", "7", "B", "0", "B", "0", "B"]


def test_verify_finds_damage_and_poisons(pool: str) -> None:
    assert run("verify", pool).stdout == f"pool {pool!r} is sound\n"
    assert answer("verify", pool)["ok"] is True
    with Segment(segment_path(pool)) as raw:
        raw.damage_total()
    found = answer("verify", pool, code=1)
    assert (found["ok"], found["state"], found["problems_count"]) == (False, "poisoned", 1)
    [problem] = found["problems"]
    assert problem["kind"] == "an axis total differs from its recount"
    assert (problem["expected"], problem["actual"]) == (0, 1)
    result = run("verify", pool)
    assert result.exit_code == 1
    assert "an axis total differs from its recount" in result.stdout
    assert refusal("report", pool)[0].startswith("shmcache: the pool is poisoned")
    with Segment(segment_path(pool)) as raw:
        raw.put(3, 8, 0)  # the total is right again, the pool stays poisoned
    assert run("verify", pool).exit_code == 1
    assert run("destroy", pool).exit_code == 0


# ---- list --------------------------------------------------------------------------------------


def entry(name: str) -> Any:
    """What the list says of one pool; others may be there."""
    [found] = [entry for entry in answer("list")["pools"] if entry["name"] == name]
    return found


def test_list_shows_pools_and_takes_no_slot(pool: str) -> None:
    with attached(pool):
        found = entry(pool)
        assert (found["state"], found["usable"], found["owners"]) == ("active", True, 1)
        assert (found["host_current_bytes"], found["host_limit_bytes"]) == (7, 32 << 10)
        assert found["problem"] is None
        with CacheResidencyPool.observe(pool) as observer:
            assert [owner.attach_seq for owner in observer.owners()] == [2]  # after the creator


def foreign(path: Path) -> None:
    path.write_bytes(b"not a pool" * 1000)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def from_another_namespace(path: Path) -> None:
    with Segment(path) as raw:
        raw.forge("pid_namespace", 1)


def from_before_the_boot(path: Path) -> None:
    with Segment(path) as raw:
        raw.forge("boot_id", 1)


def scribbled(path: Path) -> None:
    with Segment(path) as raw:
        raw.forge("owners_max", 9, signed=False)


def for_everyone(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (foreign, "magic"),
        (cut, "size"),
        (from_another_namespace, "pid_namespace"),
        (from_before_the_boot, "boot_id"),
        (scribbled, "checksum"),
        (for_everyone, "mode"),
    ],
)
def test_list_names_the_failed_check(pool: str, damage: Callable[[Path], None], check: str) -> None:
    damage(segment_path(pool))
    found = entry(pool)
    assert (found["state"], found["usable"], found["pool_id"]) == ("refused", False, None)
    assert found["size_bytes"] == segment_path(pool).stat().st_size
    assert found["problem"]["error"] == "SegmentError.Refused"
    assert found["problem"]["attributes"]["check"] == check
    [line] = [line for line in run("list").stdout.splitlines() if line.startswith(pool)]
    assert f"failed the check {check}" in line


def test_list_says_why_a_poisoned_pool_is_not_usable(pool: str) -> None:
    with Segment(segment_path(pool)) as raw:
        raw.damage_total()
    assert run("verify", pool).exit_code == 1
    found = entry(pool)
    assert (found["state"], found["usable"]) == ("poisoned", False)
    assert found["problem"]["error"] == CachePoolError.Poisoned.__qualname__


def test_a_file_name_cannot_speak_to_the_terminal(pool_name: str) -> None:
    name = f"{pool_name}\n\x1b[2J\udcff"
    (SHM / f"shmcache.{name}").touch()
    text = run("list").stdout
    assert "\x1b" not in text
    assert ascii(name) in text
    assert entry(name)["problem"]["error"] == "ValueError"


# ---- help and failures -------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_an_example_that_parses(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    example = result.stdout.partition("Example:\n")[2].splitlines()[0]
    words = example.partition("|")[0].split()
    assert words[:2] == ["shmcache", command]
    main.commands[command].make_context(command, words[2:])


def test_an_error_of_the_system_is_told_like_our_own() -> None:
    document = error_document(OSError(errno.ENOSPC, "disk full"))
    assert document["error"] == "SegmentError.HostError"
    assert document["attributes"] == {"call": "a system call", "errno_name": "ENOSPC"}


def test_reclaim_says_which_files_it_could_not_delete(pool: str, tmp_path: Path) -> None:
    """A link where their folder was: an operator may remove it, or give the files up."""
    with Worker("from shmcache import *") as worker:
        worker.call(
            "pool = CacheResidencyPool.attach(name)\nfolder = pool.live_directory(place).path",
            name=pool,
            place=str(tmp_path),
        )
        folder = Path(worker.call("str(folder)"))
        worker.kill()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("elsewhere")
    for _ in range(2):
        lines = run("reclaim", pool).stdout.splitlines()
        assert lines[-1].startswith(f"live files of process {worker.pid} in {tmp_path} are not")
    [owner] = answer("reclaim", pool)["reclaimed"]
    assert owner["undeleted"][0]["place"] == str(tmp_path)
    run("reclaim", pool, "--forget-files")
    assert run("reclaim", pool).stdout == "nothing to reclaim\n"
