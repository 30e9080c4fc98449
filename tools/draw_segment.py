#!/usr/bin/env python3
"""Draws docs/segment.md, the bytes of a segment, from shmcache/core/layout.h.

Why: whoever looks at a segment with another tool, or at a damaged one, needs offsets, and offsets
copied by hand go wrong. The header's comments are the words; this script computes the numbers.
tests/test_segment_doc.py fails when the page is stale; run without arguments, it is made fresh.

Reads only what layout.h uses: constants, enums, and structs of plain fields with a comment before
or after each.
"""

import argparse
import ast
import operator
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = ROOT / "shmcache" / "core" / "layout.h"

# Bytes, which are also the alignment. The mutex is glibc's on x86-64; whatever its size, the next
# field has a cache line of its own.
TYPES = {"uint64_t": 8, "uint32_t": 4, "uint8_t": 1, "char": 1}
MUTEX_BYTES, MUTEX_ALIGN = 40, 8

HEAD = """\
# The bytes of a segment

Drawn by `tools/draw_segment.py` from `shmcache/core/layout.h`; do not edit. Sizes and offsets are
in bytes and decimal; an offset counts from the start of its structure. The header is at byte 0 of
the file; its `region_offset`, at byte {region_offset}, says where each region starts.
The mutex is that of glibc on x86-64.
"""


class Field(NamedTuple):
    """One line of a struct."""

    name: str
    type: str
    length: int
    offset: int
    bytes: int
    comment: str


class Struct(NamedTuple):
    """A struct with its size and the comment above it."""

    name: str
    comment: str
    bytes: int
    align: int
    fields: tuple[Field, ...]


class Value(NamedTuple):
    """A #define or an enumerator."""

    name: str
    number: int
    comment: str


class Layout:
    """What the header says: constants, enums (by name) and structs, in its order."""

    def __init__(self, text: str) -> None:
        self.intro = comment_text(text.partition("*/")[0])
        self.constants: list[Value] = []
        self.enums: dict[str, list[Value]] = {}
        self.structs: dict[str, Struct] = {}
        self._numbers = {"UINT64_MAX": (1 << 64) - 1, "sizeof_pthread_mutex_t": MUTEX_BYTES}
        pieces = re.finditer(
            r"^#define (?P<constant>SHMC_\w+) +(?P<value>[^\n]*)$"
            r"|^enum (?P<enum>shmc_\w+) \{\n(?P<values>.*?)^\};"
            r"|(?:^/\*(?P<comment>(?:(?!\*/).)*)\*/\n)?^struct (?P<struct>shmc_\w+) \{\n"
            r"(?P<fields>.*?)^\};",
            text,
            re.M | re.S,
        )
        for piece in pieces:
            if piece["constant"]:
                self._add_constant(piece["constant"], piece["value"])
            elif piece["enum"]:
                self._add_enum(piece["enum"], piece["values"])
            else:
                self._add_struct(piece["struct"], piece["comment"] or "", piece["fields"])

    def number(self, expression: str) -> int:
        """The value of a C constant expression."""
        plain = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)u?l*\b", r"\1", expression)
        plain = plain.replace("sizeof(pthread_mutex_t)", "sizeof_pthread_mutex_t")
        return evaluate(ast.parse(plain.strip(), mode="eval").body, self._numbers)

    def _add_constant(self, name: str, rest: str) -> None:
        expression, _, comment = rest.partition("/*")
        value = Value(name, self.number(expression), comment_text(comment.removesuffix("*/")))
        self.constants.append(value)
        self._numbers[name] = value.number

    def _add_enum(self, name: str, body: str) -> None:
        values: list[Value] = []
        for comment, code in commented_lines(body, ","):
            label, _, expression = code.partition("=")
            number = self.number(expression) if expression else len(values)
            values.append(Value(label.strip(), number, comment))
            self._numbers[label.strip()] = number
        self.enums[name] = values

    def _add_struct(self, name: str, comment: str, body: str) -> None:
        fields: list[Field] = []
        end, widest = 0, 1
        for said, code in commented_lines(body, ";"):
            declared = re.fullmatch(r"(?:struct )?(\w+) (\w+)(?:\[(.*)\])?", code)
            if not declared:
                raise ValueError(f"not a field that this script can read: {code!r}")
            size, align = self._size(declared[1])
            length = self.number(declared[3]) if declared[3] else 1
            offset = -(-end // align) * align
            fields.append(Field(declared[2], declared[1], length, offset, size * length, said))
            end, widest = offset + size * length, max(widest, align)
        total = -(-end // widest) * widest
        self.structs[name] = Struct(name, comment_text(comment), total, widest, tuple(fields))

    def _size(self, type_name: str) -> tuple[int, int]:
        if type_name == "pthread_mutex_t":
            return MUTEX_BYTES, MUTEX_ALIGN
        if type_name in self.structs:
            return self.structs[type_name].bytes, self.structs[type_name].align
        return TYPES[type_name], TYPES[type_name]


def evaluate(node: ast.expr, names: dict[str, int]) -> int:
    """Integer arithmetic over known names; KeyError for anything else."""
    operators = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.floordiv,
        ast.LShift: operator.lshift,
    }
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return int(
            operators[type(node.op)](evaluate(node.left, names), evaluate(node.right, names))
        )
    return names[ast.unparse(node)]


def commented_lines(body: str, end: str) -> Iterator[tuple[str, str]]:
    """(comment, code) of each line that ends with `end`; the comment stands before or after."""
    pattern = rf"(?:/\*(?P<before>(?:(?!\*/).)*)\*/)?\s*(?P<code>[^/;,]+?)\s*{end}"
    pattern += r"(?:[ ]*/\*(?P<after>(?:(?!\*/).)*)\*/)?"
    for line in re.finditer(pattern, body, re.S):
        yield comment_text(line["before"] or line["after"] or ""), line["code"]


def comment_text(comment: str) -> str:
    """Without the stars and the line breaks of C; paragraphs and indented lines are kept."""
    return "\n".join(re.sub(r"^\s*\* ?", "", line) for line in comment.strip().splitlines()).strip()


# The page -----------------------------------------------------------------------------------------


def page(layout: Layout) -> str:
    header = {field.name: field for field in layout.structs["shmc_header"].fields}
    head = HEAD.format(region_offset=header["region_offset"].offset)
    parts = [head, intro(layout.intro), "## Limits and constants\n\n" + constants(layout)]
    parts += [struct_section(struct) for struct in layout.structs.values()]
    parts += [enum_section(name, values) for name, values in layout.enums.items()]
    return "\n".join(parts)


def intro(text: str) -> str:
    """The header's own introduction; its indented lines are a table."""
    said = []
    for paragraph in text.partition("\n\n")[2].split("\n\n"):
        lines = paragraph.splitlines()
        if lines[0].startswith("  "):
            said.append(table([re.split(r"  +", line.strip()) for line in lines]))
        else:
            said.append(wrapped(paragraph))
    return "\n".join(said)


def constants(layout: Layout) -> str:
    rows = [["name", "value", "meaning"]]
    rows += [[f"`{one.name}`", shown(one.number), one.comment] for one in layout.constants]
    return table(rows)


def shown(number: int) -> str:
    """Powers of two from 64 Ki on, and words with all bits in use, are easier to read so."""
    if number >= 1 << 60:
        return f"{number:#x}"
    if number >= 1 << 16 and number & (number - 1) == 0:
        return f"2^{number.bit_length() - 1}"
    return str(number)


def struct_section(struct: Struct) -> str:
    rows = [["offset", "bytes", "field", "written by", "rule"]]
    for field in struct.fields:
        writer, rule = rule_of(field.comment)
        name = field.name + (f"[{field.length}]" if field.length > 1 else "")
        rows.append([str(field.offset), str(field.bytes), f"`{name}`", writer, rule])
    if not any(row[3] for row in rows[1:]):
        rows = [row[:3] + row[4:] for row in rows]
    head = f"## `{struct.name}`: {struct.bytes} bytes\n\n"
    return head + wrapped(struct.comment) + "\n" + table(rows)


def rule_of(comment: str) -> tuple[str, str]:
    """`[who, how] what` apart; a comment may have several such pairs, then it stays one rule."""
    text = " ".join(comment.split())
    if match := re.fullmatch(r"\[([^\]]*)\] ?([^\[]*)", text):
        return match[1], match[2]
    return "", text


def enum_section(name: str, values: list[Value]) -> str:
    rows = [["value", "name", "meaning"]]
    rows += [[str(one.number), f"`{one.name}`", " ".join(one.comment.split())] for one in values]
    if not any(row[2] for row in rows[1:]):
        rows = [row[:2] for row in rows]
    return f"## `enum {name}`\n\n" + table(rows)


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False) + "\n"


def table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows]
    return lines[0] + "|" + " --- |" * len(rows[0]) + "\n" + "".join(lines[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    parser.add_argument("--layout", type=Path, default=LAYOUT, help="another layout.h")
    parser.add_argument("page", nargs="?", type=Path, default=ROOT / "docs" / "segment.md")
    arguments = parser.parse_args()
    fresh = page(Layout(arguments.layout.read_text(encoding="utf-8")))
    if not arguments.check:
        arguments.page.write_text(fresh, encoding="utf-8")
    elif not arguments.page.exists() or arguments.page.read_text(encoding="utf-8") != fresh:
        print(f"{arguments.page} is stale: run tools/draw_segment.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
