"""torch is optional: nothing imports it by itself, and who asks for it is told how to get it."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)


def test_importing_the_package_imports_no_torch() -> None:
    done = run("import sys, shmcache; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_its_absence_names_the_command() -> None:
    done = run("import sys; sys.modules['torch'] = None\nimport shmcache; shmcache.TorchBackend")
    assert done.stderr.endswith("ImportError: TorchBackend needs torch: pip install torch\n")


def test_other_names_are_missing_as_ever() -> None:
    done = run("import shmcache; shmcache.TorchBackends")
    assert "module 'shmcache' has no attribute 'TorchBackends'" in done.stderr
