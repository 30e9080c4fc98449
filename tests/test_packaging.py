"""What a user installs is whole: the source distribution builds, and the wheel has every part."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT


def build(kind: str, source: Path, out: Path) -> Path:
    """One distribution, made by the build backend as any installer would call it."""
    hook = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", hook], cwd=source, check=True, capture_output=True, text=True
    )
    return out / done.stdout.splitlines()[-1]


@pytest.mark.ci
@pytest.mark.watchdog(600)
def test_a_wheel_built_from_the_source_distribution_is_whole(tmp_path: Path) -> None:
    """Nothing that was built before takes part: it would stand in for a file left out."""
    built = shutil.ignore_patterns(".*", "*.egg-info", "build", "*.so", "_core.c", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=built)
    with tarfile.open(build("sdist", tmp_path / "checkout", tmp_path)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    with zipfile.ZipFile(build("wheel", source, tmp_path)) as wheel:
        inside = set(wheel.namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.pyi", "py.typed")
        for path in (ROOT / "shmcache").rglob(pattern)
    }
    assert "shmcache/py.typed" in wanted
    assert wanted - inside == set()
    assert any(name.startswith("shmcache/_core.") and name.endswith(".so") for name in inside)
