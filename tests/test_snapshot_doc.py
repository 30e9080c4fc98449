"""docs/snapshot.md names every key, its schema is fresh, and a key that goes or changes is seen."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from shmcache import SNAPSHOT_VERSION
from tests.support import ROOT

PAGE = (ROOT / "docs" / "snapshot.md").read_text(encoding="utf-8")


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "tools" / "draw_snapshot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw = load_script()


def test_the_schema_is_fresh() -> None:
    """Whoever changes a struct draws it again (tools/draw_snapshot.py) and minds the version."""
    assert draw.SCHEMA.read_text(encoding="utf-8") == draw.text()


def test_every_key_is_explained() -> None:
    schema = draw.snapshot_schema()
    keys = {key for part in schema["$defs"].values() for key in part.get("properties", ())}
    assert len(keys) > 60
    assert keys - set(re.findall(r"`(\w+)`", PAGE)) == set()


def test_the_version_is_told() -> None:
    assert f"This is version {SNAPSHOT_VERSION}" in PAGE
