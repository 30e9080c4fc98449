"""Builds the crash harness, once per mutant of the engine, and runs its experiments.

The engine is compiled from its sources with the flags of the extension, so that the instructions at
which it is killed are those that ship. `crash.h` says what the harness promises.
"""

import os
import subprocess
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

HERE = Path(__file__).parent
ENGINE = ROOT / "shmcache" / "core"
PATIENCE_S = 900  # the tests' own watchdogs are nearer

CLEAN, VIOLATED, REFUSED, CANNOT_TRACE = 0, 1, 4, 77  # exit codes of the harness


class Outcome(NamedTuple):
    """How an experiment ended: its exit code, one dict of figures per line, and its complaints."""

    code: int
    figures: list[dict[str, str]]
    text: str

    def total(self, figure: str) -> int:
        """The sum of one figure over all lines."""
        return sum(int(line.get(figure, 0)) for line in self.figures)


Experiment = Callable[..., Outcome]
Builder = Callable[..., Path]


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Build the harness with one mutant of the engine ("" is the engine itself), once.

    `past_self_test`: the engine's self-test of robust mutexes is told what it hopes for.
    """
    folder = tmp_path_factory.mktemp("crash")
    with (ROOT / "pyproject.toml").open("rb") as file:
        (extension,) = tomllib.load(file)["tool"]["setuptools"]["ext-modules"]
    compiler = [os.environ.get("CC", "cc")]
    flags = [*extension["extra-compile-args"], f"-I{ENGINE}", f"-I{HERE}"]

    def compiled(source: Path, *defines: str) -> str:
        """The object file; the same for all builds that define nothing the source knows."""
        text = source.read_text()
        known = [define for define in defines if define in text]
        target = folder / "-".join([source.stem, *known, ".o"])
        if not target.exists():
            switches = [f"-D{define}" for define in known]
            run_tool([*compiler, *flags, *switches, "-c", str(source), "-o", str(target)])
        return str(target)

    def build(mutant: str, *, past_self_test: bool = False) -> Path:
        defines = ["SHMC_COPIES", *([f"SHMC_MUTANT_{mutant}"] if mutant else [])]
        defines += ["CRASH_PAST_SELF_TEST"] if past_self_test else []
        program = folder / "-".join(["crash", *defines])
        if not program.exists():
            sources = [*ENGINE.glob("*.c"), *HERE.glob("*.c")]
            with ThreadPoolExecutor() as threads:
                objects = list(threads.map(lambda source: compiled(source, *defines), sources))
            wrap = ["-Wl,--wrap=pthread_mutex_trylock"] if past_self_test else []
            link = [*extension["extra-link-args"], *wrap, "-lpthread", "-o", str(program)]
            run_tool([*compiler, *objects, *link])
        return program

    return build


def run_tool(command: list[str]) -> None:
    """Run a compiler; its complaints are the failure's text."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def crash(builder: Builder, record_property: Callable[[str, object], None]) -> Experiment:
    """Run `crash EXPERIMENT OPTIONS...`; figures are printed and become properties of the test."""

    def run(*arguments: object, mutant: str = "", past_self_test: bool = False) -> Outcome:
        program = builder(mutant, past_self_test=past_self_test)
        command = [str(program), *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        text = f"crash {' '.join(command[1:])}: exit code {done.returncode}\n"
        text += done.stdout + done.stderr
        print(text)  # noqa: T201 (shown with -s and with a failure)
        if done.returncode == CANNOT_TRACE:
            pytest.skip("ptrace is not permitted here: no process can be stepped")
        lines = [line for line in done.stdout.splitlines() if "=" in line]
        figures = [dict(pair.split("=") for pair in line.split()) for line in lines]
        for line in figures:
            name = line.get("operation") or line["scene"]
            record_property(name, " ".join(f"{key}={value}" for key, value in line.items()))
        return Outcome(done.returncode, figures, text)

    return run
