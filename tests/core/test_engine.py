"""The C engine alone, as a plain program under sanitizers: each C test is a test here.

Why: the engine must be right without Python around it, and only a program can be built whole with a
sanitizer. Tests are found by their `TEST(name)` lines, compiled once per session and kind of build,
and run each in a process of its own. ENGINE_TEST_SEED repeats a run, ENGINE_TEST_FACTOR lengthens
the randomised ones. The mutants are compile flags of the engine itself.
"""

import contextlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

HERE = Path(__file__).parent
ENGINE = ROOT / "shmcache" / "core"
COMPILER = os.environ.get("CC") or "gcc"
FLAGS = "-std=c11 -D_GNU_SOURCE -g -Wall -Wextra -Werror -fno-omit-frame-pointer".split()
LONGER = 10  # how much longer the randomised tests run in CI


class Build(NamedTuple):
    """One way to compile the engine and its tests."""

    name: str
    flags: tuple[str, ...]
    sanitizer: str = ""
    files: tuple[str, ...] = ()  # of the tests; empty: all


PLAIN = Build("plain", ("-O2",))
ADDRESS = Build(
    "address",
    ("-O1", "-DSHMC_DEBUG", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "address,undefined",
)
THREAD = Build(
    "thread",
    ("-O1", "-fsanitize=thread"),
    "thread",
    ("harness.c", "threads.c", "arena_threads.c"),
)


# The sanitizer's own allocator is not safe in the child of a process with threads.
NOT_UNDER_ADDRESS = {"threads_do_not_disturb_a_fork"}

# The engine with one of its safeguards compiled out, and the test that must notice it.
MUTANTS = {
    "NO_NONCE": ("owners.c", "a_late_cleaner_leaves_another_cleaning_alone"),
    "UNFENCED_CLEANING": ("owners.c", "a_late_cleaner_harms_nobody"),
    "PID_ONLY": ("verdicts.c", "a_reused_pid_is_no_sign_of_life"),
    "NO_REDO": ("recovery.c", "a_change_is_whole_wherever_its_maker_died"),
    "NON_ROBUST": ("locks.c", "robust_mutexes_work_here"),
    "PLAIN_LOCK": ("locks.c", "a_held_lock_makes_others_busy"),
    "BLIND_EVICTION": ("arena.c", "random_requests_on_blocks_behave_as_the_model_does"),
}


def names_in(pattern: str) -> list[str]:
    """The names of the C tests in files that match."""
    texts = [path.read_text() for path in sorted(HERE.glob(pattern))]
    return [name for text in texts for name in re.findall(r"^TEST\((\w+)\)", text, re.M)]


FILES = sorted(path.name for path in HERE.glob("*.c") if names_in(path.name))

# These repeat themselves ENGINE_TEST_FACTOR times.
RANDOM = [name for name in names_in("*.c") if name.startswith(("any_", "random_"))]


class Builds:
    """Programs compiled in this session, by build; each is made, or fails, once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Build, Path | str] = {}

    def program(self, build: Build) -> Path:
        """The compiled program; skips the test when this machine cannot make it."""
        if shutil.which(COMPILER) is None:
            pytest.skip(f"no C compiler {COMPILER}: install gcc or set CC")
        if build not in self._made:
            self._made[build] = self._missing(build) or self._compile(build)
        made = self._made[build]
        if isinstance(made, str):
            (pytest.skip if made.startswith("no ") else pytest.fail)(made)
        return made

    def _compile(self, build: Build) -> Path | str:
        """The program, or what the compiler said."""
        folder = self._folder / build.name
        folder.mkdir()
        tests = [path for path in HERE.glob("*.c") if path.name in (build.files or [path.name])]
        sources = sorted([*ENGINE.glob("*.c"), *tests])
        objects = [str(folder / f"{number}.o") for number in range(len(sources))]
        flags = [COMPILER, *FLAGS, *build.flags, f"-I{ENGINE}", f"-I{HERE}"]
        commands = [
            [*flags, "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            said = [done.stdout for done in pool.map(run, commands) if done.returncode != 0]
        program = folder / "engine"
        if not said:
            link = run([*flags, *objects, "-lpthread", "-Wl,-z,now", "-o", str(program)])
            said = [link.stdout] if link.returncode != 0 else []
        return "\n".join(said) or program

    def _missing(self, build: Build) -> str:
        """Why a program with the sanitizer cannot be made or does not start; "" when it can."""
        if not build.sanitizer:
            return ""
        source = self._folder / "probe.c"
        source.write_text("int main(void) { return 0; }\n")
        program = self._folder / f"probe_{build.name}"
        done = run([COMPILER, f"-fsanitize={build.sanitizer}", str(source), "-o", str(program)])
        if done.returncode == 0:
            done = run([str(program)])
        if done.returncode == 0:
            return ""
        return f"no {build.sanitizer} sanitizer on this machine: {done.stdout.strip()[-200:]}"


def run(
    command: list[str], limit_s: float | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end; both outputs together. The C programs have a watchdog of their own."""
    return subprocess.run(
        command,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66", **(environment or {})},
    )


def expect_ok(program: Path, name: str, *, factor: int = 1) -> None:
    """The C test passes."""
    environment = {"ENGINE_TEST_FACTOR": str(factor)} if factor != 1 else {}
    done = run([str(program), name], environment=environment)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [f"{name} ok"]), done.stdout


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """The programs of this session."""
    return Builds(tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("file", FILES)
def test_as_shipped(builds: Builds, file: str) -> None:
    """Every test of the file, optimised and without assertions, as the extension is built."""
    for name in names_in(file):
        expect_ok(builds.program(PLAIN), name)


@pytest.mark.parametrize("name", sorted(set(names_in("*.c")) - NOT_UNDER_ADDRESS))
def test_address_and_undefined(builds: Builds, name: str) -> None:
    """No test fails, leaks, leaves its memory, or does what C leaves undefined."""
    expect_ok(builds.program(ADDRESS), name)


@pytest.mark.parametrize("name", names_in("*threads.c"))
def test_threads(builds: Builds, name: str) -> None:
    """No two threads touch a word without an order between them."""
    expect_ok(builds.program(THREAD), name)


@pytest.mark.ci
@pytest.mark.parametrize("name", RANDOM)
def test_random_for_longer(builds: Builds, name: str) -> None:
    """The same with other seeds, many times as often."""
    expect_ok(builds.program(ADDRESS), name, factor=LONGER)


@pytest.mark.ci
@pytest.mark.parametrize("name", names_in("*threads.c"))
def test_threads_for_longer(builds: Builds, name: str) -> None:
    """The same with other seeds, many times as often."""
    expect_ok(builds.program(THREAD), name, factor=LONGER)


@pytest.mark.ci
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(builds: Builds, name: str) -> None:
    """The test that guards a safeguard fails, or never ends, without it."""
    file, test = MUTANTS[name]
    flags = ("-O1", f"-DSHMC_MUTANT_{name}", "-Wno-unused")
    program = builds.program(Build(f"mutant_{name}", flags, files=("harness.c", file)))
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = run([str(program), test], limit_s=10)
        assert done.returncode != 0, f"{test} passes without the safeguard"
        assert re.search(rf"{file}:\d+: ", done.stdout), f"no expectation failed: {done.stdout}"


@pytest.mark.ci
def test_the_sanitizer_notices_counts_without_their_lock(builds: Builds) -> None:
    """Mutant NAIVE_COUNTS: two threads of one handle change leases and their ring at once."""
    flags = (*THREAD.flags, "-DSHMC_MUTANT_NAIVE_COUNTS", "-Wno-unused")
    program = builds.program(Build("mutant_threads", flags, THREAD.sanitizer, THREAD.files))
    longer = {"ENGINE_TEST_FACTOR": "8"}  # it ends when it is caught
    done = run([str(program), "threads_share_the_blocks_of_one_handle"], environment=longer)
    assert (done.returncode, "data race" in done.stdout) == (66, True), done.stdout
