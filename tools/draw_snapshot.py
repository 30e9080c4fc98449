#!/usr/bin/env python3
"""Draws docs/snapshot-schema.json, the JSON Schema of a pool's snapshot, from its structs.

Why: tools in other languages check what they read, and a schema written by hand goes wrong.
tests/test_snapshot_doc.py fails when the file is stale; run, this makes it fresh.
"""

import json
from pathlib import Path

from shmcache import snapshot_schema

SCHEMA = Path(__file__).resolve().parent.parent / "docs" / "snapshot-schema.json"


def text() -> str:
    """What the file has to be."""
    return json.dumps(snapshot_schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
