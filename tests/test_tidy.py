"""The rules of this code base that a machine can check; each is shown to bite on a bad sample.

A rule is one function: it takes a source file and says what is wrong with it. To add one, write the
function and a line in RULES with a sample that it must complain about. When a rule makes a place
worse, change the rule here and say why.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

import pytest

from tests.support import ROOT

COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70  # without the docstring
FILE_LINES_MAX = {".py": 500, ".pyi": 500, ".c": 600, ".h": 600, ".pyx": 600}

# What each part of the package may import, beside itself and the standard library. `shmcache` is
# the public API: the names that the root exports. `*` is anything foreign.
LAYERS = {
    "errors": "",
    "bounds": "",
    "_building": "numpy setuptools",
    "policy": "errors bounds msgspec numpy",
    "states": "errors bounds policy msgspec",
    "_core": "errors bounds cpython cython libc numpy posix",
    "pool": "errors bounds policy states _core telemetry posix_ipc numpy msgspec ml_dtypes",
    "io": "errors bounds policy states msgspec",
    "telemetry": "errors bounds policy states msgspec psutil",
    "prompt": "errors bounds policy states msgspec numpy ml_dtypes safetensors",
    "session": "errors bounds policy states _core pool io telemetry prompt"
    " msgspec numpy ml_dtypes torch",
    "shmcache": "errors bounds policy states _core pool io telemetry prompt session",
    "doctor": "shmcache errors bounds msgspec",
    "workloads": "shmcache errors bounds *",
    "integrations": "shmcache errors bounds *",
    "cli": "shmcache errors bounds doctor workloads integrations click rich",
}

# Contract files whose names the package must export by now.
IMPLEMENTED = [
    "io.md",
    "lifecycle.md",
    "persistence.md",
    "policy.md",
    "pool.md",
    "prompt_cache.md",
    "residency.md",
    "storage.md",
    "telemetry.md",
]
CONTRACT = ROOT.parent / "shared" / "contract" / "README.md"

FOLDERS = ("shmcache", "tests", "tools", "docs", ".ci")
GENERATED = ("shmcache/_core.c", "shmcache/_core.html")


class Source(NamedTuple):
    """A file of the project: its path below the root, and its text."""

    path: PurePosixPath
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """The key of LAYERS it belongs to; "" outside the package."""
        if self.path.parts[0] != "shmcache":
            return ""
        name = self.path.parts[1].partition(".")[0]
        return "shmcache" if name == "__init__" else name


def sources() -> Iterator[Source]:
    """Every text file of the project that a person wrote."""
    found = [path for path in ROOT.iterdir() if path.suffix in (".toml", ".md")]
    found += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in sorted(found):
        relative = PurePosixPath(path.relative_to(ROOT))
        if not path.is_file() or str(relative) in GENERATED:
            continue
        if {"__pycache__", "corpus"} & set(path.parts):  # a corpus was written by a fuzzer
            continue
        try:
            yield Source(relative, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # a built library, a picture


# Sizes --------------------------------------------------------------------------------------------


def columns(source: Source) -> Iterator[str]:
    if source.path.suffix in FILE_LINES_MAX or source.path.suffix == "":
        for number, line in enumerate(source.text.splitlines(), 1):
            if len(line) > COLUMNS_MAX:
                yield f"line {number} has {len(line)} columns"


def file_length(source: Source) -> Iterator[str]:
    lines, cap = source.text.count("\n"), FILE_LINES_MAX.get(source.path.suffix)
    if cap and lines > cap:
        yield f"{lines} lines, the cap is {cap}"


def function_length(source: Source) -> Iterator[str]:
    find = {".py": python_functions, ".pyx": cython_functions, ".c": c_functions, ".h": c_functions}
    for name, lines in find.get(source.path.suffix, no_functions)(source):
        if lines > FUNCTION_LINES_MAX:
            yield f"{name} has {lines} lines, the cap is {FUNCTION_LINES_MAX}"


def no_functions(source: Source) -> Iterator[tuple[str, int]]:
    yield from ()


def python_functions(source: Source) -> Iterator[tuple[str, int]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            yield node.name, lines - (ast.get_docstring(node, clean=False) or "").count("\n")


def cython_functions(source: Source) -> Iterator[tuple[str, int]]:
    """By indentation: until the next line that is not deeper than the `def`."""
    lines = source.text.splitlines()
    for number, line in enumerate(lines):
        start = re.match(r"( *)(?:def|cdef|cpdef)\b[^=]*?(\w+)\(", line)
        if not start:
            continue
        last = number
        for later in range(number + 1, len(lines)):
            text = lines[later]
            if text.strip() and not text.startswith((start[1] + " ", start[1] + ")")):
                break
            last = later if text.strip() else last
        yield start[2], last - number + 1


def c_functions(source: Source) -> Iterator[tuple[str, int]]:
    """A definition begins in the first column and ends with a `}` there."""
    for match in re.finditer(
        r"^(?!#|typedef\b)\w[^;{}]*?(\w+)\([^;{}]*\)\s*\{.*?^\}",
        without_comments(source),
        re.M | re.S,
    ):
        yield match[1], match[0].count("\n") + 1


# Words --------------------------------------------------------------------------------------------


def module_docstring(source: Source) -> Iterator[str]:
    if source.path.suffix == ".py" and source.text.strip() and not ast.get_docstring(source.tree):
        yield "no module docstring"
    if source.path.suffix in (".c", ".h") and not source.text.startswith("/* " + source.path.name):
        yield f"must begin with /* {source.path.name}: what it is for"


def public_docstrings(source: Source) -> Iterator[str]:
    if source.part and source.path.suffix == ".py":
        yield from undocumented(source.tree)


def undocumented(parent: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Public names; not `new`, which by the contract is the class call under another name."""
    for node in parent.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
        if node.name.startswith("_") or node.name == "new":
            continue
        if marks & {"overload", "override", "setter"}:
            continue
        if not ast.get_docstring(node):
            yield f"line {node.lineno}: {node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node)


def private_paths(source: Source) -> Iterator[str]:
    for match in re.finditer(r"(?<![\w.*])/(?:home|root|work|Users)/\w+", source.text):
        yield f"names a folder of somebody's machine: {match[0]}"


# Imports and calls --------------------------------------------------------------------------------


def layers(source: Source) -> Iterator[str]:
    # A stub imports nothing at run time: it may name the types of higher layers.
    if not source.part or source.path.suffix not in (".py", ".pyx"):
        return
    if source.part not in LAYERS:
        yield f"{source.part} has no layer yet: add it to LAYERS"
        return
    allowed = {source.part, *LAYERS[source.part].split()}
    for part in sorted(set(map(imported_part, imports(source)))):
        foreign = "*" in allowed and part not in LAYERS
        if part not in allowed and part not in sys.stdlib_module_names and not foreign:
            yield f"{source.part} must not import {part}"


def imports(source: Source) -> Iterator[str]:
    """Dotted names: `from a import b` gives a.b, relative ones are made absolute."""
    if source.path.suffix == ".pyx":
        for line in re.finditer(r"^\s*(?:from\s+(\S+)\s+)?c?import\s+(.*)", source.text, re.M):
            for name in line[2].strip("()\\ ").split(","):
                yield ".".join(filter(None, (line[1], name.split()[0] if name.split() else "")))
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(source.path.parent.parts[: len(source.path.parent.parts) - node.level + 1])
            start = (base if node.level else []) + ([node.module] if node.module else [])
            yield from (".".join([*start, alias.name]) for alias in node.names)


def imported_part(dotted: str) -> str:
    head, _, rest = dotted.partition(".")
    child = rest.partition(".")[0]
    return child if head == "shmcache" and child in LAYERS else head


def banned_imports(source: Source) -> Iterator[str]:
    if source.path.suffix not in (".py", ".pyx"):
        return
    banned = {"multiprocessing.shared_memory": "its tracker unlinks other people's segments"}
    if source.part:
        unsafe = "bytes of others are input, and unpickling runs them"
        banned |= dict.fromkeys(["pickle", "marshal", "shelve", "dill", "cloudpickle"], unsafe)
    for name in imports(source):
        for ban, reason in banned.items():
            if f"{name}.".startswith(f"{ban}."):
                yield f"imports {name}: {reason}"


def banned_calls(source: Source) -> Iterator[str]:
    if source.path.suffix != ".py":
        return
    banned = {"multiprocessing.Queue": "a killed reader wedges it", "mp.Queue": "as above"}
    if source.path.parts[0] == "tests" and source.path.name != "support.py":
        banned["time.sleep"] = banned["sleep"] = "wait for what must happen: support.wait_until"
    if source.part:
        banned |= {"eval": "runs input", "exec": "runs input", "os.system": "runs input"}
        if source.part != "cli":
            banned["print"] = "a library says nothing unasked"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"line {node.lineno}: bare except"
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in banned:
            yield f"line {node.lineno}: calls {name}: {banned[name]}"


# The engine ---------------------------------------------------------------------------------------


SYSTEM_CALLS = """
    mmap munmap mremap mprotect madvise msync mlock memfd_create shm_open shm_unlink
    open openat close read pread write pwrite lseek ftruncate fallocate posix_fallocate
    stat fstat lstat statx fstatfs statvfs link unlink rename opendir readdir readlink
    fopen fgets fcntl flock ioctl poll ppoll select epoll_create1 epoll_ctl epoll_wait eventfd
    syscall futex pidfd_open fork vfork clone execve kill tgkill waitpid waitid prctl
    getpid gettid getppid getuid geteuid getrandom
    clock_gettime clock_nanosleep gettimeofday time nanosleep usleep sleep sched_yield
""".split()


def engine_memory_orders(source: Source) -> Iterator[str]:
    if is_engine(source) and source.path.name != "atomics.h":
        orders = r"\b(?:__atomic_|__ATOMIC_|__sync_|memory_order_|atomic_|_Atomic\b)\w*"
        for name in sorted(set(re.findall(orders, without_comments(source)))):
            yield f"{name} belongs in atomics.h"


def engine_system_calls(source: Source) -> Iterator[str]:
    if is_engine(source) and source.path.name != "os_linux.c":
        calls = rf"(?<![\w.>])({'|'.join(SYSTEM_CALLS)})\s*\("
        for name in sorted(set(re.findall(calls, without_comments(source)))):
            yield f"{name}() belongs in os_linux.c"


def engine_locks(source: Source) -> Iterator[str]:
    if not is_engine(source):
        return
    text = without_comments(source)
    for name in sorted(
        set(re.findall(r"\bpthread_(?:cond|rwlock|barrier|spin)_\w+|\bsem_\w+", text))
    ):
        yield f"{name}: wedges when a waiter is killed"
    # process.c: a leaf mutex of one process, for its list of handles.
    if source.path.name not in ("lock.c", "os_linux.c", "process.c"):
        for name in sorted(set(re.findall(r"\bpthread_mutex_\w+(?=\s*\()", text))):
            yield f"{name}() belongs in lock.c"


def engine_knows_no_python(source: Source) -> Iterator[str]:
    if is_engine(source) and re.search(r"\bPy[A-Z_]\w+|Python\.h", source.text):
        yield "the engine knows no Python"


def is_engine(source: Source) -> bool:
    return source.path.parts[:2] == ("shmcache", "core") and source.path.suffix in (".c", ".h")


def without_comments(source: Source) -> str:
    """C text with comments and string contents removed, lines kept."""
    return re.sub(
        r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"",
        lambda match: "\n" * match[0].count("\n"),
        source.text,
        flags=re.S,
    )


# The table ----------------------------------------------------------------------------------------

LONG = "".join(f"    {n};\n" for n in range(FUNCTION_LINES_MAX))
RULES: list[tuple[Callable[[Source], Iterable[str]], str, str]] = [
    (columns, "tools/x", "#" * 101),
    (file_length, "tests/x.py", "\n" * 501),
    (function_length, "tests/x.py", "def f():\n" + LONG),
    (
        function_length,
        "shmcache/_core.pyx",
        "cdef class A:\n    def f(self):\n" + "        1\n" * 70,
    ),
    (function_length, "shmcache/core/x.c", "static int f(int a,\n   int b)\n{\n" + LONG + "}\n"),
    (module_docstring, "tests/x.py", "import os\n"),
    (module_docstring, "shmcache/core/x.c", "#include <a.h>\n"),
    (public_docstrings, "shmcache/pool/x.py", "class A:\n    'Why.'\n    def f(self): pass\n"),
    (private_paths, "docs/x.md", "see /ho" + "me/someone/notes"),
    (layers, "shmcache/policy/x.py", "def f():\n    from shmcache.pool.values import A\n"),
    (layers, "shmcache/policy/x.py", "from ..pool import values\n"),
    (layers, "shmcache/policy/x.py", "from shmcache import CachePoolLimits\n"),
    (layers, "shmcache/cli/x.py", "from shmcache import pool\n"),
    (layers, "shmcache/io/x.py", "import numpy as np\n"),
    (layers, "shmcache/_core.pyx", "from shmcache.pool cimport values\n"),
    (layers, "shmcache/unheard_of.py", ""),
    (banned_imports, "shmcache/pool/x.py", "from pickle import loads\n"),
    (banned_imports, "tests/x.py", "from multiprocessing import shared_memory\n"),
    (banned_calls, "tests/pool/x.py", "import time\ntime.sleep(1)\n"),
    (banned_calls, "tools/x.py", "try:\n    f()\nexcept:\n    pass\n"),
    (banned_calls, "shmcache/pool/x.py", "print(1)\n"),
    (engine_memory_orders, "shmcache/core/x.c", "__atomic_load_n(w, __ATOMIC_RELAXED);"),
    (engine_system_calls, "shmcache/core/x.c", "fd = open(path, 0);"),
    (engine_locks, "shmcache/core/x.c", "pthread_mutex_lock(&m);"),
    (engine_locks, "shmcache/core/lock.c", "pthread_cond_wait(&c, &m);"),
    (engine_knows_no_python, "shmcache/core/x.c", "#include <Python.h>"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES))
def test_the_project_keeps(rule: Callable[[Source], Iterable[str]]) -> None:
    """No file has a complaint."""
    complaints = [f"{source.path}: {text}" for source in sources() for text in rule(source)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(("rule", "path", "text"), RULES)
def test_the_rule_bites(rule: Callable[[Source], Iterable[str]], path: str, text: str) -> None:
    """A bad sample has a complaint."""
    assert list(rule(Source(PurePosixPath(path), text)))


def test_every_folder_of_the_package_is_a_package() -> None:
    """An installation leaves out folders without __init__.py."""
    folders = {path.parent for path in (ROOT / "shmcache").rglob("*.py")}
    assert sorted(f for f in folders if not (f / "__init__.py").exists()) == []


@pytest.mark.parametrize("file", IMPLEMENTED)
def test_contract_names_are_exported(file: str) -> None:
    """Names that the contract only mentions in parentheses are not asked for."""
    if not CONTRACT.exists():
        pytest.skip("the contract's folder is not beside this checkout")
    import shmcache

    row = next(line for line in CONTRACT.read_text().splitlines() if line.startswith(f"| {file} "))
    names = re.findall(r"\w+", re.sub(r"\(.*?\)", "", row.split("|")[2]))
    assert len(names) > 1
    assert [name for name in names if name not in shmcache.__all__] == []
