"""Every case of the case log has a test that carries its number, or a sentence in the caveats."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

LOG = ROOT.parent / "shared" / "cases.md"
PATTERN = r"(?i)(?:(?<![a-z0-9])|(?<=_))c\d\d(?![a-z0-9])"
TESTS = sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.c"))


@pytest.mark.skipif(not LOG.exists(), reason="the case log is not beside this checkout")
def test_every_case_is_told_of() -> None:
    wanted = re.findall(r"^\*\*(C\d\d)\*\*", LOG.read_text(), re.M)
    assert len(wanted) > 50
    texts = [path.read_text() for path in TESTS if path.name != "test_case_log.py"]
    texts.append((ROOT / "docs" / "caveats.md").read_text())
    told = {number.upper() for text in texts for number in re.findall(PATTERN, text)}
    assert not set(wanted) - told


def test_the_page_of_reliability_names_what_is_there() -> None:
    """Tests that a table names exist."""
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = set(re.findall(r"`(tests/[\w/.]+)`", page))
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]
