"""Sizes: what is understood, what is refused and with which words, and the way back."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shmcache.bounds import U64_MAX
from shmcache.cli.sizes import SIZE, FiniteRange, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512b", 512),
        ("1_000_000", 1_000_000),
        ("64k", 65536),
        ("64K", 65536),
        ("64KiB", 65536),
        ("64kib", 65536),
        ("64KB", 64000),
        ("512M", 512 << 20),
        ("512 MiB", 512 << 20),
        ("512MB", 512_000_000),
        ("8GiB", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("1.5G", 3 << 29),
        ("0.5k", 512),
        ("2.5GB", 2_500_000_000),
        ("1T", 1 << 40),
        ("1PB", 10**15),
        ("1_024 k", 1 << 20),
        (" 7 ", 7),
        ("18446744073709551615", U64_MAX),
        ("15.5E", 31 << 59),
    ],
)
def test_understood(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a size"),
        ("-1", "is not a size"),
        ("+1", "is not a size"),
        ("k", "is not a size"),
        ("1e9", "'e9'|is not a size"),
        ("1,5G", "is not a size"),
        (".5G", "is not a size"),
        ("1__0", "is not a size"),
        ("_1", "is not a size"),
        ("0x10", "is not a size|is not a unit"),
        ("٣", "is not a size"),
        ("1  G", "is not a size"),
        ("1G\n2", "is not a size"),
        ("inf", "is not a size"),
        ("5X", "'X' in '5X' is not a unit"),
        ("5iB", "is not a unit"),
        ("5Gbit", "is not a unit"),
        ("1.5", "not a whole number of bytes"),
        ("0.3k", "not a whole number of bytes"),
        ("16E", "is more than 18446744073709551615 bytes"),
        ("18446744073709551616", "is more than"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_size(text)


@pytest.mark.parametrize("power", range(64))
def test_powers_of_two_round_trip(power: int) -> None:
    assert parse_size(format_size(1 << power)) == 1 << power


@given(st.integers(0, 10239), st.integers(0, 5))
def test_what_one_decimal_says_exactly_round_trips(tenths: int, unit: int) -> None:
    if (tenths << 10 * unit) % 10 == 0:
        size_bytes = (tenths << 10 * unit) // 10
        assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(0, U64_MAX))
def test_a_formatted_size_is_close_and_short(size_bytes: int) -> None:
    text = format_size(size_bytes)
    assert len(text) <= len("1023.9 GiB")
    number, unit = text.split(" ")
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(unit)
    assert abs(float(number) * scale - size_bytes) <= 0.0501 * scale


@click.command()
@click.option("--host", type=SIZE, default=1 << 20, show_default=True)
def _command(host: int) -> None:
    click.echo(repr(host))


def test_as_an_option() -> None:
    runner = CliRunner()
    assert runner.invoke(_command, []).output == "1048576\n"
    assert runner.invoke(_command, ["--host", "1.5GiB"]).output == "1610612736\n"
    assert "SIZE" in runner.invoke(_command, ["--help"]).output
    refused = runner.invoke(_command, ["--host", "lots"])
    assert refused.exit_code == 2
    assert "'lots' is not a size" in refused.output


def test_a_number_that_is_none_belongs_to_no_range() -> None:
    finite = FiniteRange(0, min_open=True)
    assert finite.convert("1.5", None, None) == 1.5
    for text in ("nan", "inf", "-inf", "1e999", "0", "-1", "x"):
        with pytest.raises(click.BadParameter):
            finite.convert(text, None, None)
