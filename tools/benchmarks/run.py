"""Run benchmarks and print their rows; see tools/bench."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rows import Row

_NOT_BENCHMARKS = {"run", "rows", "engine", "arena_reader"}


def main() -> None:
    """Run the named benchmarks, or all."""
    here = Path(__file__).parent
    known = sorted(path.stem for path in here.glob("*.py") if path.stem not in _NOT_BENCHMARKS)
    parser = argparse.ArgumentParser(prog="tools/bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"one of: {', '.join(known)}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(known)
    if unknown:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {known}")
    for name in arguments.names or known:
        rows = importlib.import_module(name).run()
        if arguments.json:
            for row in rows:
                sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        else:
            _print(name, rows)


def _print(name: str, rows: list[Row]) -> None:
    table = Table("what", "figure", "ratio", "to", "wanted", title=name)
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}x"
        table.add_row(row.name, f"{row.value:,.4g} {row.unit}", ratio, row.peer, row.target)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
