#!/usr/bin/env python3
"""Draws docs/states.md from the transition tables of shmcache/states (see tables.py there).

Why: a diagram drawn by hand is wrong by the second change. tests/test_states_doc.py fails when the
page is stale; this script, run without arguments, makes it fresh.
"""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shmcache import states  # noqa: E402
from shmcache.states.tables import Transition  # noqa: E402

Table = Sequence[Transition[Any]]

HEAD = """\
# State machines

Drawn by `tools/draw_states.py` from the tables in `shmcache/states/`; do not edit. An arrow is a
call that is legal there, as `call [condition] / answer`; the dot is absence. Calls that are
answered without a change stand below the picture. Any other call is refused and changes nothing.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    parser.add_argument("page", nargs="?", type=Path, default=ROOT / "docs" / "states.md")
    arguments = parser.parse_args()
    fresh = page()
    if not arguments.check:
        arguments.page.write_text(fresh, encoding="utf-8")
    elif not arguments.page.exists() or arguments.page.read_text(encoding="utf-8") != fresh:
        print(f"{arguments.page} is stale: run tools/draw_states.py", file=sys.stderr)
        return 1
    return 0


def page() -> str:
    sections = (
        f"## {name}\n\n{summary}\n\n```mermaid\n{diagram(rows)}```\n{unchanged(rows)}"
        for name, summary, rows in tables()
    )
    return "\n".join([HEAD, *sections])


def tables() -> Iterator[tuple[str, str, Table]]:
    """Every table there is: a heading, the first line of its module's docstring, its rows."""
    for module_name in sorted(info.name for info in pkgutil.iter_modules(states.__path__)):
        module = importlib.import_module(f"{states.__name__}.{module_name}")
        for constant, rows in sorted(vars(module).items()):
            if constant.endswith("TRANSITIONS"):
                part = constant.removesuffix("TRANSITIONS").strip("_").lower()
                heading = f"{module_name}: {part}" if part else module_name
                yield heading, (module.__doc__ or "").partition("\n")[0], rows


def diagram(rows: Table) -> str:
    """Arrows between the same two states share one line."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.source is not row.target:
            ends = state(row.source, "[*]"), state(row.target, "[*]")
            arrows.setdefault(ends, []).append(label(row))
    lines = [f"    {a} --> {b} : {', '.join(labels)}\n" for (a, b), labels in arrows.items()]
    return "stateDiagram-v2\n" + "".join(lines)


def unchanged(rows: Table) -> str:
    places: dict[str, list[str]] = {}
    for row in rows:
        if row.source is row.target:
            places.setdefault(label(row), []).append(state(row.source, "absent"))
    lines = [f"* `{call}`: {', '.join(where)}\n" for call, where in places.items()]
    return "\n" + "".join(lines) if lines else ""


def state(value: Enum | None, absent: str) -> str:
    return absent if value is None else value.name


def label(row: Transition[Any]) -> str:
    when = f" [{row.when}]" if row.when else ""
    result = f" / {row.result}" if row.result else ""
    text = row.event + when + result
    if set(text) & set(":;\n"):
        raise ValueError(f"mermaid ends a label at one of its characters: {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
