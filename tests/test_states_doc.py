"""docs/states.md is what tools/draw_states.py draws from the tables of today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "tools" / "draw_states.py"
PAGE = ROOT / "docs" / "states.md"


def draw(*arguments: str | Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own, after the statements `before`."""
    code = f"import runpy, sys; {before or 'pass'}; sys.argv[0] = {str(SCRIPT)!r}; "
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_page_is_fresh() -> None:
    checked = draw("--check")
    assert checked.returncode == 0, checked.stderr


def test_a_page_that_was_edited_is_stale(tmp_path: Path) -> None:
    page = tmp_path / "states.md"
    assert draw("--check", page).returncode == 1
    assert draw(page).returncode == 0
    assert page.read_text() == PAGE.read_text()
    page.write_text(page.read_text().replace("begin_write", "begin_writing"))
    stale = draw("--check", page)
    assert stale.returncode == 1
    assert "stale: run tools/draw_states.py" in stale.stderr


@pytest.mark.parametrize("module", ["storage", "execution"])
def test_a_page_is_stale_when_a_table_has_changed(module: str) -> None:
    change = f"from shmcache.states import {module} as m; m.TRANSITIONS = m.TRANSITIONS[:-1]"
    assert draw("--check", before=change).returncode == 1


def test_a_table_of_another_name_is_drawn_too() -> None:
    change = "from shmcache.states import storage as m; m.OTHER_TRANSITIONS = m.TRANSITIONS[:1]"
    drawn = draw("/dev/stdout", before=change)
    assert "## storage: other\n" in drawn.stdout


def test_a_label_that_mermaid_would_cut_is_refused() -> None:
    change = (
        "from shmcache.states import storage as m; "
        "m.TRANSITIONS = (m.TRANSITIONS[0]._replace(when='a: b'),)"
    )
    drawn = draw("/dev/stdout", before=change)
    assert drawn.returncode == 1
    assert "'device [a: b]'" in drawn.stderr
