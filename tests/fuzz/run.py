"""Run fuzzers, two at a time: `tools/fuzz [TARGET ...] [--seconds N]`.

Engine targets are C under libFuzzer with sanitizers (clang), the others Python under atheris. A
finding is printed as hex, with the command that repeats it, and is exit code 1. New inputs that
reach new code are kept in a folder of the caller's (`--corpus`), by default a temporary one.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.targets import TARGETS, seeds
from tests.support import ROOT

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
ENGINE = ROOT / "shmcache" / "core"
ENGINE_TARGETS = tuple(sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.c")))
NAMES = (*ENGINE_TARGETS, *TARGETS)
AT_ONCE = 2
HOUR_S = 3600
MEMORY_MIB = 2048
SANITIZED = "-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all".split()


class Outcome(NamedTuple):
    """What became of one target. `finding`: the input that is no answer."""

    name: str
    runs: int
    coverage: int
    finding: bytes | None
    text: str


def build(name: str, folder: Path) -> list[str]:
    """The command of a target, without libFuzzer's arguments."""
    if name in TARGETS:
        return [sys.executable, "-m", "tests.fuzz.under_atheris", name]
    program = folder / f"fuzz_{name}"
    own = compiled(HERE / f"fuzz_{name}.c", folder)
    objects = [*sorted(folder.glob("engine_*.o")), own]
    link = ["clang", *SANITIZED, *map(str, objects), "-lpthread", "-o", str(program)]
    subprocess.run(link, check=True)
    return [str(program)]


def build_engine(folder: Path) -> None:
    """The objects that all engine targets share."""
    harness = ROOT / "tests" / "core" / "harness.c"
    sources = [*sorted(ENGINE.glob("*.c")), harness, HERE / "choices.c"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda source: compiled(source, folder, "engine_"), sources))


def compiled(source: Path, folder: Path, prefix: str = "") -> Path:
    """The object of a C file."""
    made = folder / f"{prefix}{source.stem}.o"
    flags = "-std=c11 -D_GNU_SOURCE -DFUZZING -DSHMC_DEBUG -g -O1 -Wno-unused-function".split()
    command = ["clang", *flags, *SANITIZED, f"-I{ENGINE}", f"-I{ROOT / 'tests' / 'core'}"]
    subprocess.run([*command, "-c", str(source), "-o", str(made)], check=True)
    return made


def fuzz(name: str, seconds: int, folder: Path, kept: Path) -> Outcome:
    """Run one target for so long."""
    inputs = kept / name
    inputs.mkdir(parents=True, exist_ok=True)
    if name in TARGETS:
        for number, data in enumerate(seeds(name)):
            (inputs / f"seed{number}").write_bytes(data)
    artifacts = folder / f"{name}-"
    command = [*build(name, folder), f"-max_total_time={seconds}", "-timeout=25"]
    command += [f"-rss_limit_mb={MEMORY_MIB}", f"-artifact_prefix={artifacts}", "-max_len=65536"]
    known = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    done = subprocess.run(
        [*command, str(inputs), *known],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},  # a fuzzer ends without tidying up
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    text = done.stdout.decode("utf-8", "replace")
    runs = re.findall(r"Done (\d+) runs", text)
    coverage = re.findall(r"cov: (\d+)", text)
    found = sorted(folder.glob(f"{name}-*"))
    if done.returncode != 0 and not found:
        raise RuntimeError(f"fuzzing {name} failed: {text[-2000:]}")
    finding = found[0].read_bytes() if found else None
    return Outcome(
        name, int(runs[-1]) if runs else 0, int(coverage[-1]) if coverage else 0, finding, text
    )


def tell(outcome: Outcome) -> None:
    """One line for what went well; all that is needed to repeat what did not."""
    if outcome.finding is None:
        print(f"{outcome.name}: {outcome.runs:,} runs, {outcome.coverage:,} places, no finding")
        return
    print(f"{outcome.name}: FINDING\n{outcome.text[-6000:]}")
    print(f"input, in hex: {outcome.finding.hex()}")
    print(f"repeat: write it to a file, then tools/fuzz {outcome.name} --input FILE", flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", default=[], help=f"of {', '.join(NAMES)}; default all"
    )
    parser.add_argument("--seconds", type=int, help="for each; default: an hour for all together")
    parser.add_argument("--corpus", type=Path, help="where inputs are kept")
    parser.add_argument("--input", type=Path, help="only this one, for one target")
    options = parser.parse_args()
    chosen = options.targets or list(NAMES)
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"no targets: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    chosen = [name for name in chosen if _can_run(name)]
    seconds = options.seconds or max(1, AT_ONCE * HOUR_S // max(1, len(chosen)))
    with tempfile.TemporaryDirectory(prefix="shmcache-fuzz-") as made:
        folder = Path(made)
        if set(chosen) & set(ENGINE_TARGETS):
            build_engine(folder)
        if options.input is not None:
            return subprocess.run(
                [*build(chosen[0], folder), str(options.input)], check=False
            ).returncode
        kept = options.corpus or folder / "corpus"
        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = list(pool.map(lambda name: fuzz(name, seconds, folder, kept), chosen))
        for outcome in outcomes:
            tell(outcome)
    return 1 if any(outcome.finding is not None for outcome in outcomes) else 0


def _can_run(name: str) -> bool:
    """Whether what a target needs is here; says so when it is not."""
    if name in ENGINE_TARGETS and not _can_build():
        print(f"{name}: not run, for there is no clang with libFuzzer (clang, libclang-rt-dev)")
        return False
    if name in TARGETS and importlib.util.find_spec("atheris") is None:
        print(f"{name}: not run, for there is no atheris (pip install atheris)")
        return False
    return True


@functools.cache
def _can_build() -> bool:
    """Whether clang is here, and has its sanitizers and libFuzzer."""
    if shutil.which("clang") is None:
        return False
    probe = "int LLVMFuzzerTestOneInput(const char *d, long n) { return d == 0 && n == 0; }"
    command = ["clang", *SANITIZED, "-x", "c", "-", "-o", os.devnull]
    return subprocess.run(command, input=probe.encode(), check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
