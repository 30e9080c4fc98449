"""probe.c as a child process, which can be stopped or killed inside the lock; and mutants.

with Probe(probe, "hold", path) as holder:   # `probe` is the fixture: the compiled program
    assert holder.line() == "held"
    holder.stop()
    ...
    assert holder.say("u") == "u OK"
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pytest

from tests.support import PATIENCE_S, ROOT, process_state, wait_until

ENGINE = ROOT / "shmcache" / "core"
COMPILER = os.environ.get("CC") or "gcc"
FLAGS = "-std=c11 -D_GNU_SOURCE -O1 -g -Wno-unused -lpthread -Wl,-z,now".split()


def compile_probe(program: Path, *flags: str) -> Path:
    """Compile probe.c and the engine into `program`; skips the test where there is no compiler."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler {COMPILER}: install gcc or set CC")
    sources = [*sorted(ENGINE.glob("*.c")), Path(__file__).with_name("probe.c")]
    run([COMPILER, *map(str, sources), f"-I{ENGINE}", *FLAGS, *flags, "-o", str(program)])
    return program


def compile_package(folder: Path, *flags: str) -> Path:
    """Make `folder` a place to import another build of shmcache from."""
    if importlib.util.find_spec("Cython") is None or shutil.which(COMPILER) is None:
        pytest.skip("another build of the extension needs Cython and a C compiler")
    package = folder / "shmcache"
    shutil.copytree(ROOT / "shmcache", package, ignore=shutil.ignore_patterns("*.so", "_core.c"))
    run([sys.executable, "-m", "cython", str(package / "_core.pyx")])
    sources = [package / "_core.c", *sorted((package / "core").glob("*.c"))]
    include = [
        f"-I{folder}" for folder in (ENGINE, sysconfig.get_path("include"), np.get_include())
    ]
    target = package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    shared = [COMPILER, "-shared", "-fPIC", "-o", str(target)]
    run([*shared, *map(str, sources), *include, *FLAGS, *flags])
    return folder


def run(command: list[str]) -> None:
    """Run a compiler; fails with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Probe:
    """One running probe. Leaving the `with` block kills it."""

    def __init__(self, program: Path, *words: object) -> None:
        self._process = subprocess.Popen(
            [str(program), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def line(self) -> str:
        """The next line it prints, without the newline; "" at its end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def send(self, letter: str) -> None:
        """Send a letter without waiting for an answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{letter}\n")

    def say(self, letter: str) -> str:
        """Send a letter; the answer."""
        self.send(letter)
        return self.line()

    def stop(self) -> None:
        """SIGSTOP; returns when the kernel shows it as stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(self.pid) == "T", f"probe {self.pid} stops")

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is dead. Idempotent."""
        self._process.kill()
        self._process.wait(PATIENCE_S)


def holding(program: Path, path: Path) -> Probe:
    """A probe that has joined the segment and holds its lock."""
    holder = Probe(program, "hold", path)
    assert holder.line() == "held"
    return holder
