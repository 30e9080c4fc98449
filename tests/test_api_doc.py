"""docs/api.md is what the docstrings say, and every public thing says something."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from tests.support import ROOT


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("draw_api", ROOT / "tools" / "draw_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw_api = load_script()


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="signatures are drawn as 3.11 shows them"
)
def test_the_page_is_fresh() -> None:
    """Whoever changes a docstring draws the page again: tools/draw_api.py."""
    fresh = draw_api.PAGE.read_text(encoding="utf-8") == draw_api.page()
    assert fresh, "docs/api.md is stale"


def test_nothing_public_is_silent() -> None:
    """Every class, function, method and property has a docstring."""
    assert draw_api.silent() == []
