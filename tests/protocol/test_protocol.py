"""G1, G3, G5, G6: the engine's protocols as models, checked in every state by SPIN.

Each model is checked whole; with each of its negative controls, a safeguard left out, it must fail.
The steps of a model name lines of the engine, which must be there, in the model's order.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

HERE = Path(__file__).parent
ENGINE = ROOT / "shmcache" / "core"
MODELS = sorted(path.name for path in HERE.glob("*.pml"))
COMPLETE = {  # the defines with which a model holds, and how many states it has at least
    ("redo.pml", ""): 5_000,
    ("pins.pml", ""): 500_000,
    ("pins.pml", "LEASES=2"): 5_000_000,
    ("waiting.pml", ""): 3_000,
    ("waiting.pml", "DEATHS SLICES"): 3_000,
    ("owners.pml", ""): 30_000,
}
CONTROLS = {
    "redo.pml": ("NO_REDO", "COMMIT_FIRST", "PLAIN_LOCK", "EARLY_CLEAR"),
    "pins.pml": (
        "NO_REREAD",
        "NO_READER_FENCE",
        "NO_FENCE",
        "NAIVE_COUNTS",
        "MASK_RESET",
        "BLIND_EVICTION",
        "NO_PUT_BACK",
        "CLEAN_THE_LIVING",
    ),
    "waiting.pml": ("TOLD_LATE", "SEEN_LATE", "WAKE_FIRST", "DEATHS"),
    "owners.pml": ("NO_NONCE", "UNFENCED_CLEANING", "FREE_EARLY", "GUESSED_DEATH"),
}

spin = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="needs spin and gcc (Debian: apt-get install spin gcc)",
)


class Search(NamedTuple):
    """What SPIN said of all states it could reach."""

    errors: int
    states: int
    complete: bool
    text: str


def search(folder: Path, model: str, defines: str) -> Search:
    """Compile and run the verifier of a model."""
    (folder / model).write_text((HERE / model).read_text())
    flags = [f"-D{define}" for define in defines.split()]
    for command in (
        ["spin", "-a", *flags, model],
        ["gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"],
    ):
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stdout + made.stderr
    command = ["./pan", "-m1000000"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    errors = re.search(r"errors: (\d+)", done.stdout)
    states = re.search(r"(\d+) states, stored", done.stdout)
    assert errors is not None, done.stdout + done.stderr
    assert states is not None, done.stdout
    truncated = "Search not completed" in done.stdout or "max search depth" in done.stdout
    return Search(int(errors[1]), int(states[1]), not truncated, done.stdout)


@spin
@pytest.mark.ci
@pytest.mark.watchdog(600)
@pytest.mark.parametrize(("model", "defines"), COMPLETE)
def test_the_protocol_holds_in_every_state(tmp_path: Path, model: str, defines: str) -> None:
    found = search(tmp_path, model, defines)
    assert found.errors == 0, found.text
    assert found.complete, found.text
    assert found.states >= COMPLETE[model, defines], "the model has lost most of its states"


@spin
@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "control"), [(model, one) for model in MODELS for one in CONTROLS[model]]
)
def test_a_protocol_without_a_safeguard_fails(tmp_path: Path, model: str, control: str) -> None:
    found = search(tmp_path, model, control)
    assert found.errors > 0, f"{control} makes no difference: {found.text}"
    assert re.search(r"assertion violated|invalid end state", found.text), found.text


class Step(NamedTuple):
    """A line of the engine that a model names."""

    file: str
    function: str
    text: str


def steps(model: str) -> list[Step]:
    """In the order of the model."""
    pattern = r"/\* C (\w+\.c) (\w+): (.*?) \*/"
    return [Step(*found) for found in re.findall(pattern, (HERE / model).read_text())]


def body(file: str, function: str) -> str:
    """The text of a function, in one line, without what only mutants have."""
    text = (ENGINE / file).read_text()
    text = re.sub(r"#ifdef SHMC_MUTANT_\w+\n.*?#(?:else|endif)\n", "", text, flags=re.S)
    start = re.search(rf"^[a-z].*\b{function}\(", text, re.M)
    assert start is not None, f"{file} has no {function}()"
    end = text.index("\n}", start.start())
    return " ".join(text[start.start() : end].split())


@pytest.mark.parametrize("model", MODELS)
def test_the_steps_are_those_of_the_engine(model: str) -> None:
    """Each is a line of its function; those of one function come in the order that C has."""
    found = steps(model)
    assert len(found) >= 5
    for file, function in dict.fromkeys((step.file, step.function) for step in found):
        code = body(file, function)
        places = []
        for step in found:
            if (step.file, step.function) == (file, function):
                assert step.text in code, f"{file}: {function}() has no {step.text!r}"
                places.append(code.index(step.text))
        assert places == sorted(places), f"{function}() does these in another order"


def test_every_control_is_a_define_of_its_model() -> None:
    """And every define of a model is a control, or stands among what holds."""
    for model in MODELS:
        text = (HERE / model).read_text()
        defines = set(re.findall(r"#\s*(?:ifn?def|elif defined\() ?(\w+)", text))
        defines |= set(re.findall(r"defined\((\w+)\)", text))
        held = {name for made, names in COMPLETE if made == model for name in names.split()}
        assert defines == set(CONTROLS[model]) | {name.partition("=")[0] for name in held}, model
