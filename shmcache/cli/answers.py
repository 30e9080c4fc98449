"""What a command answers, and how people, scripts and failures get to see it.

Why         A command is a function from arguments to an answer; whether that becomes a table or
            JSON, which exit code it has and what happens when the reader has gone is decided here,
            once, for all of them.
Contract    Exit 0: done. Exit 1: a finding or a refusal. Exit 2: the command line is wrong. With
            --json every answer and every error is one JSON object on one line of stdout. Without
            it answers are text on stdout and errors two lines on stderr: the fact, and what to do
            next. A reader that goes away (`| head`) is no error and changes no exit code.
Not here    A traceback for what this package raises on purpose. A bug of its own keeps one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import IO, Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shmcache.errors import ContractError, SegmentError

_JSON = "shmcache.json"  # key of the context's meta: whether --json was asked for
_WIDE = 10_000  # columns when nobody looks: a script's line is never wrapped or cut


class Answer(NamedTuple):
    """What a command found: the object for scripts, lines and tables for people.

    `finding` is what exit code 1 tells.
    """

    document: Mapping[str, object]
    text: tuple[str | Text | Table, ...]
    finding: bool = False


class Commands(click.Group):
    """The group of all commands; it prints what they return and what they raise."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note --json first of all: a wrong command line is answered in JSON too."""
        options = args[: args.index("--")] if "--" in args else args
        ctx.meta[_JSON] = "--json" in options
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        """Run one command and end with its exit code."""
        try:
            answer = super().invoke(ctx)
        except click.UsageError as error:
            if not ctx.meta[_JSON]:
                raise
            emit(Answer(_usage_document(error), ()))
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            raise  # nobody reads the help: click ends quietly
        except (ContractError, OSError) as error:
            _show_error(error)
            ctx.exit(1)
        if isinstance(answer, Answer):
            emit(answer)
            ctx.exit(int(answer.finding))


class Command(click.Command):
    """A command with --json."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params.append(
            click.Option(
                ["--json"], is_flag=True, expose_value=False, help="Answer one line of JSON."
            )
        )


def emit(answer: Answer) -> None:
    """Print one answer, flushed. Commands that stream call it themselves."""
    if click.get_current_context().meta[_JSON]:
        text = json.dumps(answer.document, default=_plain) + "\n"
    else:
        text = _rendered(answer.text)
    with _reader_may_leave(sys.stdout):
        sys.stdout.write(text)
        sys.stdout.flush()


def json_asked() -> bool:
    """Whether the command line has --json."""
    return bool(click.get_current_context().meta[_JSON])


def table(columns: str, rows: Iterable[Iterable[object]]) -> Table:
    """Columns are separated by spaces in `columns`; a `>` before a name aligns it right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns.split():
        right = column.startswith(">")
        made.add_column(
            Text(column.removeprefix(">").replace("_", " ")),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    return made


# ---- errors ------------------------------------------------------------------------------------


def error_document(error: ContractError | OSError) -> dict[str, object]:
    """An error as JSON has it: its name, the fact, the advice, and its payload."""
    if not isinstance(error, ContractError):
        error = SegmentError.HostError.of("a system call", error)
    payload = dataclasses.fields(error)  # type: ignore[arg-type]  # every variant is one
    return {
        "error": type(error).__qualname__,
        "message": _fact(error),
        "hint": error.hint,
        "attributes": {field.name: getattr(error, field.name) for field in payload},
    }


def _fact(error: ContractError) -> str:
    return str(error).removesuffix(f": {error.hint}")


def _usage_document(error: click.UsageError) -> dict[str, object]:
    hint = f"see {error.ctx.command_path} --help" if error.ctx else "see shmcache --help"
    return {"error": "usage", "message": error.format_message(), "hint": hint, "attributes": {}}


def _show_error(error: ContractError | OSError) -> None:
    document = error_document(error)
    if click.get_current_context().meta[_JSON]:
        emit(Answer(document, ()))
        return
    lines = [f"shmcache: {document['message']}"]
    if document["hint"]:
        lines.append(f"  {document['hint']}")
    with _reader_may_leave(sys.stderr):
        click.echo("\n".join(lines), err=True)


# ---- output ------------------------------------------------------------------------------------


def _rendered(text: tuple[str | Text | Table, ...]) -> str:
    """The text as it goes to stdout: colours and the terminal's width only on a terminal."""
    terminal = sys.stdout.isatty()
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=shutil.get_terminal_size().columns if terminal else _WIDE,
        highlight=False,
    )
    with console.capture() as captured:
        for part in text:
            console.print(Text(part) if isinstance(part, str) else part)
    return "".join(f"{line.rstrip(' ')}\n" for line in captured.get().splitlines())


def _plain(value: object) -> object:
    """What the json module does not know: enums and structs."""
    if isinstance(value, Enum):
        return value.value
    fields = getattr(type(value), "__struct_fields__", None)
    if fields is None:
        return str(value)
    return {field: getattr(value, field) for field in fields}


@contextlib.contextmanager
def _reader_may_leave(stream: IO[str]) -> Iterator[None]:
    """Let what nobody reads any more go nowhere, also what is flushed at exit."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
