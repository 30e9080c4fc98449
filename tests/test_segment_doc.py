"""docs/segment.md is what layout.h says, its numbers are the compiler's, and bounds.py agrees.

The script's parser knows only the C that layout.h uses, so each number it computes is compared with
that of a compiled program, and what it cannot read it must refuse.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from shmcache import bounds
from tests.support import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = ROOT / "tools" / "draw_segment.py"
HEADER = ROOT / "shmcache" / "core" / "layout.h"
COMPILER = os.environ.get("CC") or "gcc"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("draw_segment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw_segment = load_script()


@pytest.fixture(scope="module")
def layout() -> Any:
    """The header, as the script reads it."""
    return draw_segment.Layout(HEADER.read_text())


def draw(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_page_is_fresh() -> None:
    checked = draw("--check")
    assert checked.returncode == 0, checked.stderr


def test_a_page_is_stale_when_it_or_the_header_was_edited(tmp_path: Path) -> None:
    page, header = tmp_path / "segment.md", tmp_path / "layout.h"
    assert draw("--check", page).returncode == 1
    assert draw(page).returncode == 0
    header.write_text(HEADER.read_text().replace("random,", "any,"))
    stale = draw("--check", page, "--layout", header)
    assert stale.returncode == 1
    assert "stale: run tools/draw_segment.py" in stale.stderr
    page.write_text(page.read_text().replace("512", "513"))
    assert draw("--check", page).returncode == 1


# Numbers ------------------------------------------------------------------------------------------


def computed(layout: Any) -> dict[str, int]:
    """C expressions, and what the script takes for their values."""
    numbers = {one.name: one.number for one in layout.constants}
    for values in layout.enums.values():
        numbers |= {one.name: one.number for one in values}
    for struct in layout.structs.values():
        name = f"struct {struct.name}"
        numbers[f"sizeof({name})"] = struct.bytes
        numbers |= {f"offsetof({name}, {field.name})": field.offset for field in struct.fields}
        numbers |= {f"sizeof((({name} *)0)->{f.name})": f.bytes for f in struct.fields}
    return numbers


def test_the_compiler_computes_the_same(layout: Any, tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        pytest.skip("the page shows the mutex of glibc on x86-64")
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler {COMPILER}: install gcc or set CC")
    expected = computed(layout)
    prints = "".join(f'printf("%llu\\n", (unsigned long long)({text}));\n' for text in expected)
    source, program = tmp_path / "numbers.c", tmp_path / "numbers"
    source.write_text(f'#include <stdio.h>\n#include "layout.h"\nint main(void) {{\n{prints}}}\n')
    options = ["-std=c11", "-D_GNU_SOURCE", f"-I{HEADER.parent}", "-o", str(program)]
    subprocess.run([COMPILER, *options, str(source)], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(expected, map(int, said), strict=True)) == expected


def test_nothing_of_the_header_is_missed(layout: Any) -> None:
    text = HEADER.read_text()
    defined = re.findall(r"^#define (SHMC_\w+) ", text, re.M)
    assert [one.name for one in layout.constants] == defined
    assert list(layout.structs) == re.findall(r"^struct (\w+) \{", text, re.M)
    assert list(layout.enums) == re.findall(r"^enum (\w+) \{", text, re.M)
    for struct in layout.structs.values():
        body = re.search(rf"^struct {struct.name} \{{(.*?)^\}};", text, re.M | re.S)
        assert body is not None
        code = re.sub(r"/\*.*?\*/", "", body[1], flags=re.S)
        assert len(struct.fields) == code.count(";")
        assert sum(bool(field.comment) for field in struct.fields) == body[1].count("/*")
        assert struct.comment, f"{struct.name} says nothing of itself"


@pytest.mark.parametrize(
    "field", ["uint64_t *next;", "uint32_t a : 3;", "uint16_t b;", "int c, d;"]
)
def test_a_field_it_cannot_read_is_refused(field: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        draw_segment.Layout(f"/* x */\nstruct shmc_x {{\n    uint64_t first;\n    {field}\n}};\n")


# The table of regions -----------------------------------------------------------------------------


def region_rows(layout: Any) -> list[list[str]]:
    lines = [line.strip() for line in layout.intro.splitlines() if line.startswith("  ")]
    return [re.split(r"  +", line) for line in lines][1:]


def test_regions_stand_in_the_order_of_their_enum(layout: Any) -> None:
    named = [row[0].upper().replace(" ", "_") for row in region_rows(layout)]
    values = layout.enums["shmc_region"]
    assert [f"SHMC_REGION_{name}" for name in named] == [one.name for one in values[:-1]]


@pytest.mark.parametrize(
    ("region", "struct"),
    [
        ("redo", "shmc_redo"),
        ("control", "shmc_control"),
        ("owners", "shmc_owner"),
        ("managers", "shmc_entry"),
        ("reservations", "shmc_entry"),
        ("claims", "shmc_entry"),
        ("classes", "shmc_class"),
        ("slabs", "shmc_slab"),
        ("blocks", "shmc_block"),
        ("rings", "shmc_ring"),
        ("telemetry", "shmc_telemetry_row"),
        ("events", "shmc_event"),
    ],
)
def test_regions_are_tables_of_their_structs(layout: Any, region: str, struct: str) -> None:
    size = next(row[1] for row in region_rows(layout) if row[0] == region)
    assert int(size.split(" ")[0]) == layout.structs[struct].bytes


# Limits -------------------------------------------------------------------------------------------


def test_bounds_repeats_every_limit(layout: Any) -> None:
    numbers = {one.name: one.number for one in layout.constants}
    assert numbers["SHMC_OWNER_PATH_BYTES"] == bounds.OWNER_PATH_BYTES
    assert {name: numbers[name] for name in numbers if name.endswith("_LIMIT")} == {
        "SHMC_OWNERS_LIMIT": bounds.OWNERS_MAX_LIMIT,
        "SHMC_MANAGERS_LIMIT": bounds.MANAGERS_MAX_LIMIT,
        "SHMC_RESERVATIONS_LIMIT": bounds.RESERVATIONS_MAX_LIMIT,
        "SHMC_CLAIMS_LIMIT": bounds.CLAIMS_MAX_LIMIT,
        "SHMC_BLOCKS_LIMIT": bounds.BLOCKS_MAX_LIMIT,
        "SHMC_BLOCK_BYTES_LIMIT": bounds.BLOCK_BYTES_LIMIT,
        "SHMC_ARENA_BYTES_LIMIT": bounds.ARENA_BYTES_LIMIT,
    }
