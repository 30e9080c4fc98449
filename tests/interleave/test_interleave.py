"""G3, G4: a reader against an eviction, and two threads of one owner, in every order and at speed.

orders.c enumerates the orders of accesses to shared words; stress.c lets two cores decide. Each of
the five mechanisms has a mutant that one of them must catch.
"""

import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT

HERE = Path(__file__).parent
ENGINE = ROOT / "shmcache" / "core"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program of this folder, built once for each mutant of the engine."""
    folder = tmp_path_factory.mktemp("interleave")
    with (ROOT / "pyproject.toml").open("rb") as file:
        (extension,) = tomllib.load(file)["tool"]["setuptools"]["ext-modules"]

    def call(name: str, *arguments: object, mutant: str = "") -> subprocess.CompletedProcess[str]:
        program = folder / f"{name}-{mutant}"
        if not program.exists():
            defines = [f"-DSHMC_MUTANT_{mutant}"] if mutant else []
            defines += ["-DSHMC_INTERLEAVE"] if name == "orders" else []
            sources = [str(path) for path in (*sorted(ENGINE.glob("*.c")), HERE / f"{name}.c")]
            flags = [*extension["extra-compile-args"], f"-I{ENGINE}", *defines]
            link = [*extension["extra-link-args"], "-lpthread", "-o", str(program)]
            compiler = os.environ.get("CC", "cc")
            subprocess.run([compiler, *flags, *sources, *link], check=True)
        command = [str(program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode in (0, 1), done.stderr
        return done

    return call


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("scene=")]
    pairs = dict(pair.split("=") for pair in line.split())
    return {name: int(value) for name, value in pairs.items() if name != "scene"}


@pytest.mark.parametrize(
    ("scene", "bound", "schedules"), [("evict", 2, 10_000), ("renew", 1, 30), ("threads", 1, 500)]
)
def test_every_order_with_few_preemptions(run: Run, scene: str, bound: int, schedules: int) -> None:
    done = run("orders", scene, bound)
    assert done.returncode == 0, done.stdout
    assert figures(done)["schedules"] >= schedules


@pytest.mark.parametrize("scene", ["evict", "renew", "threads"])
def test_many_orders_with_many_preemptions(run: Run, scene: str, seed: int) -> None:
    done = run("orders", scene, 20_000, seed % 2**32)
    assert done.returncode == 0, done.stdout


@pytest.mark.ci
@pytest.mark.watchdog(600)
@pytest.mark.parametrize(("scene", "bound"), [("evict", 3), ("renew", 2)])
def test_every_order_with_more_preemptions(run: Run, scene: str, bound: int) -> None:
    done = run("orders", scene, bound)
    assert done.returncode == 0, done.stdout
    assert figures(done)["schedules"] > 20_000


@pytest.mark.ci
@pytest.mark.watchdog(600)
def test_many_more_orders_of_two_threads(run: Run, seed: int) -> None:
    done = run("orders", "threads", 300_000, seed % 2**32)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("seconds", [2, pytest.param(40, marks=pytest.mark.ci)])
@pytest.mark.watchdog(120)
def test_readers_and_an_evictor_at_full_speed(run: Run, seconds: int) -> None:
    done = run("stress", seconds)
    assert done.returncode == 0, done.stdout
    assert figures(done)["leases"] > 1000
    assert figures(done)["stores"] > 100


@pytest.mark.parametrize(
    ("mutant", "scene", "schedules"),
    [("NO_REREAD", "evict", 100_000), ("NAIVE_COUNTS", "threads", 500_000),
     ("MASK_RESET", "renew", 200_000)],
)  # fmt: skip
def test_mutants_that_an_order_shows(run: Run, mutant: str, scene: str, schedules: int) -> None:
    """No second look after the pin; counts apart from their bits; pins reset with the block."""
    done = run("orders", scene, schedules, 7, mutant=mutant)
    assert done.returncode == 1, done.stdout
    assert "given to somebody else" in done.stdout or "left that nobody" in done.stdout


@pytest.mark.ci
@pytest.mark.watchdog(300)
@pytest.mark.parametrize("mutant", ["NO_FENCE", "NO_READER_FENCE"])
def test_mutants_that_only_speed_shows(run: Run, mutant: str) -> None:
    """A store in the place of the exchange; no fence after bits. One core can never show it."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("only one core is ours: no store is delayed past another's load")
    assert run("stress", 200, mutant=mutant).returncode == 1  # ends when it is caught
