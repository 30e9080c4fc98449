"""Real servers under load: gunicorn and uvicorn with the applications of docs/examples.

A server runs in a session of its own, so that all it started can be killed whatever became of it.
Clients compare every answer with one that was computed without a pool.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

import shmcache as sc
from shmcache.workloads.decoder import ONE_BLAS_THREAD
from tests.support import PATIENCE_S, ROOT, process_state, wait_until

EXAMPLES = ROOT / "docs" / "examples"
TOKENS_MAX = 4
QUESTIONS = [
    f"{topic} {'Say it slowly, and then say it again. ' * 3}{ending}"
    for topic in ("What is a cache?", "Who owns a block?", "When does a lease end?")
    for ending in ("", "In one word.", "As a poem.", "To a child.")
]

_EXPECTED = """
import json, sys
from serve_model import BLOCK_TOKENS, MODEL
from shmcache.workloads.serving import ModelServer
server = ModelServer(None, MODEL, block_tokens=BLOCK_TOKENS)
for text in json.loads(sys.argv[1]):
    tokens = [*MODEL.tokenizer.turn("user", text), *MODEL.tokenizer.reply()]
    print(server.answer_alone(tokens, tokens_max=int(sys.argv[2])).digest)
"""


def environment(pool: str) -> dict[str, str]:
    """Of a server and of who computes what it must say: the same bits need the same threads."""
    paths = f"{ROOT}{os.pathsep}{EXAMPLES}{os.pathsep}{Path(__file__).parent}"
    return {**os.environ, **ONE_BLAS_THREAD, "MODEL": "tiny", "POOL": pool, "PYTHONPATH": paths}


def expected_digests(pool: str) -> dict[str, str]:
    """What the logits of each question's answer are, without any pool."""
    command = [sys.executable, "-c", _EXPECTED, json.dumps(QUESTIONS), str(TOKENS_MAX)]
    done = subprocess.run(command, env=environment(pool), capture_output=True, check=True)
    return dict(zip(QUESTIONS, done.stdout.decode().split(), strict=True))


class Server:
    """A started server; `process` is the one that was started, the arbiter."""

    def __init__(self, command: list[str], pool: str, folder: Path) -> None:
        self.pool = pool
        self._log = folder / f"server{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment(pool),
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.url = ""
        wait_until(self._listens, "the server listens")

    def said(self) -> str:
        """Its log."""
        return self._log.read_text()

    def workers(self) -> list[int]:
        """Process ids of the arbiter's children that serve."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return [child.pid for child in children if self._serves(child)]
        return []

    def _serves(self, child: psutil.Process) -> bool:
        """No resource tracker of multiprocessing, nothing dead, no newer arbiter."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return (
                child.status() != psutil.STATUS_ZOMBIE
                and "resource_tracker" not in " ".join(child.cmdline())
                and child.pid in owners_of(self.pool)
            )
        return False

    def ask(self, question: str, path: str = "/generate") -> dict[str, Any]:
        """The answer of any worker. Raises httpx.HTTPError."""
        asked = {"prompt": question, "tokens_max": TOKENS_MAX}
        answer = httpx.post(self.url + path, json=asked, timeout=PATIENCE_S)
        answer.raise_for_status()
        said: dict[str, Any] = answer.json()
        return said

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code after the signal."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def kill_all(self) -> None:
        """Whatever it started, and wait until none is left."""
        ours = [child for child in psutil.process_iter() if _session(child) == self.process.pid]
        for process in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        pids = [process.pid for process in ours]
        wait_until(lambda: all(process_state(pid) in "ZX" for pid in pids), "all are gone")

    def _listens(self) -> bool:
        found = re.search(r"(?:Listening at|running on):? (http://[0-9.:]+)", self.said())
        assert self.process.poll() is None, self.said()
        if found is None:
            return False
        self.url = found[1]
        with contextlib.suppress(httpx.HTTPError):
            self.ask(QUESTIONS[0])
            return True
        return False


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return -1


@contextlib.contextmanager
def gunicorn(
    pool: str, folder: Path, *options: str, hooks: bool = True, conf: str = ""
) -> Iterator[Server]:
    """The example under gunicorn, its configuration followed by `conf`; all killed at the end."""
    text = "from gunicorn_conf import *\nbind = '127.0.0.1:0'\n"
    if not hooks:
        text += "del when_ready, post_fork, child_exit, worker_exit, on_exit\n"
    (folder / "conf.py").write_text(text + conf)
    program = Path(sys.executable).with_name("gunicorn")  # USR2 executes it again
    command = [str(program), "--config", "conf.py", "--no-control-socket"]
    with _running([*command, *options, "asked_app:app"], pool, folder) as server:
        yield server


@contextlib.contextmanager
def uvicorn(pool: str, folder: Path) -> Iterator[Server]:
    """The FastAPI example with two workers."""
    command = [sys.executable, "-m", "uvicorn", "--port", "0", "--workers", "2"]
    with _running([*command, "serve_fastapi:app"], pool, folder) as server:
        yield server


@contextlib.contextmanager
def _running(command: list[str], pool: str, folder: Path) -> Iterator[Server]:
    server = Server(command, pool, folder)
    try:
        yield server
    finally:
        server.kill_all()


def owners_of(pool: str) -> dict[int, str]:
    """Verdicts by process id, as an outsider sees them; empty without a pool."""
    try:
        with sc.CacheResidencyPool.observe(pool) as observer:
            return {owner.pid: owner.verdict.value for owner in observer.owners()}
    except sc.SegmentError.NotFound:
        return {}


class Load:
    """Clients that ask at random until told to stop, and what became of their questions."""

    def __init__(self, url: Callable[[], str], digests: dict[str, str], seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.known_tokens = 0
        self._url = url
        self._digests = digests
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(seed + n,)) for n in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self._stopping.is_set():
            outcome, known = self._one(dice.choice(QUESTIONS))
            with self._lock:
                self.outcomes[outcome] += 1
                self.known_tokens += known

    def _one(self, question: str) -> tuple[str, int]:
        asked = {"prompt": question, "tokens_max": TOKENS_MAX}
        try:
            answer = httpx.post(self._url() + "/generate", json=asked, timeout=PATIENCE_S)
        except httpx.TimeoutException:
            return "hung", 0
        except httpx.TransportError:
            return "lost", 0
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text}", 0
        said = answer.json()
        right = said["digest"] == self._digests[question]
        return ("right" if right else "wrong"), said["known_tokens"]


def assert_nothing_held(pool: str) -> None:
    """After all servers have ended: no owner, no charge but published blocks, a sound pool."""
    with sc.CacheResidencyPool.observe(pool) as observer:
        observer.sweep()
        assert observer.owners() == ()
        report, arena = observer.report(), observer.arena_report()
        assert (arena.private_bytes, arena.leased_bytes) == (0, 0)
        assert report.current_host_bytes == arena.used_bytes
        assert (report.current_device_bytes, report.current_disk_bytes) == (0, 0)
        assert report.current_transfer_in_flight_bytes == 0
        assert observer.verify().ok
