"""The examples in the pages run: a reader may type what stands there and sees what stands there.

In a `python` fence, lines with `>>>` are examples and what follows them is their output; `...`
stands for any text. The fences of one page share their names, from top to bottom.
"""

from __future__ import annotations

import doctest
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def examples(page: Path) -> str:
    """The page with all but the insides of its python fences blanked: line numbers stay."""
    kept, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            kept.append("")
        else:
            kept.append(line if inside else "")
    return "\n".join(kept)


def failures(page: Path) -> list[str]:
    """What doctest has to say, empty if every example holds."""
    test = doctest.DocTestParser().get_doctest(
        examples(page), {"__name__": "__main__"}, page.name, str(page), 0
    )
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    return said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_hold(page: Path) -> None:
    said = failures(page)
    assert not said, "".join(said)


def test_a_wrong_example_is_found_and_other_fences_are_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\n>>> 1 / 0\n```\n```python\n>>> x = 2\n```\n```python\n>>> x\n2\n```\n")
    assert failures(page) == []
    page.write_text("```python\n>>> 1 + 1\n3\n```\n")
    assert "line 2" in "".join(failures(page))
