"""A plan's hit curve: as lines of text, as SVG, as PNG.

Why: sizes are bought by the knee of a curve, which nobody sees in a table.
Contract: the size axis is logarithmic, the rate axis ends above the ideal rate. The SVG needs
nothing but this file and shows the same in every viewer; the PNG needs matplotlib.
Errors: `WorkloadError.PackageMissing`, naming the command that installs it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from shmcache.errors import WorkloadError, size_text
from shmcache.workloads.planning import CapacityPlan, PlanTraffic

MATPLOTLIB_COMMAND: Final = "pip install 'shmcache[plot]'"

_ROWS: Final = 14  # about
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_SHARED, _PRIVATE, _POLICY, _GRID = "#1f6feb", "#8c959f", "#d1242f", "#d8dee4"

# Of the SVG: its size, and the frame within it.
_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 680, 48, 360


def text_curve(traffic: PlanTraffic) -> Iterator[str]:
    """The shared LRU curve as a filled area, its sizes below it; 64 columns wide."""
    tenths = _tenths(traffic)
    rows_per_tenth = max(1, round(_ROWS / tenths))
    for row in range(tenths * rows_per_tenth, 0, -1):
        tenth, between = divmod(row, rows_per_tenth)
        rate = " " * 5 if between else f"{tenth / 10:4.0%} "
        cells = (sample.lru_rate * 10 * rows_per_tenth - (row - 1) for sample in traffic.samples)
        yield f"{rate}│" + "".join(_EIGHTHS[round(min(max(cell, 0), 1) * 8)] for cell in cells)
    yield f"{0:4.0%} └" + "─" * len(traffic.samples)
    per_point = (len(traffic.samples) - 1) // (len(traffic.points) - 1)
    labels = (size_text(point.arena_bytes).replace(" ", "") for point in traffic.points)
    yield " " * 6 + "".join(label[:per_point].ljust(per_point) for label in labels).rstrip()


def require_drawable(path: Path) -> None:
    """Raise what `write_plot` would raise for this path, before a plan takes its time.

    Errors: `ValueError` for another suffix.
    """
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a curve is drawn as .svg or .png, not as {path.suffix or 'no suffix'}")
    if path.suffix == ".png":
        _figures()


def write_plot(plan: CapacityPlan, path: Path) -> None:
    """Draw the curve into a file, by its suffix.

    Errors: `ValueError` for another suffix, and a plan without a trace.
    """
    require_drawable(path)
    if plan.traffic is None:
        raise ValueError("there is no curve to draw without a trace")
    if path.suffix == ".svg":
        path.write_text("\n".join(_svg(plan, plan.traffic)) + "\n", encoding="utf-8")
    else:
        _write_png(plan, plan.traffic, path)


def _tenths(traffic: PlanTraffic) -> int:
    """Where the rate axis ends."""
    return max(math.ceil(traffic.ideal_rate * 10), 1)


def _title(plan: CapacityPlan) -> str:
    return f"{plan.model}: hit rate by pool size"


def _series(plan: CapacityPlan, traffic: PlanTraffic) -> Iterator[tuple[str, str, list[float]]]:
    """Name, colour and rates of each line."""
    yield "shared, lru", _SHARED, [sample.lru_rate for sample in traffic.samples]
    if plan.workers > 1:
        rates = [sample.private_rate for sample in traffic.samples]
        yield f"{plan.workers} private parts, lru", _PRIVATE, rates


# ---- SVG ---------------------------------------------------------------------------------------


def _svg(plan: CapacityPlan, traffic: PlanTraffic) -> Iterator[str]:
    frame = _Frame(traffic)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    yield _label(_LEFT, 24, _title(plan), "start", 'font-size="15"')
    yield from _axes(traffic, frame)
    sizes = [sample.arena_bytes for sample in traffic.samples]
    for number, (name, colour, rates) in enumerate(_series(plan, traffic)):
        places = " ".join(
            f"{frame.x(size):.1f},{frame.y(rate):.1f}"
            for size, rate in zip(sizes, rates, strict=True)
        )
        yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from _legend(number, name, colour)
    yield from _legend(2, f"{plan.geometry.eviction}; dashed: planned", _POLICY)
    planned = frame.x(traffic.planned.arena_bytes)
    yield _line(planned, _TOP, planned, _BOTTOM, _POLICY, "4 3")
    for point in (*traffic.points, traffic.planned):
        x, y = frame.x(point.arena_bytes), frame.y(point.policy_rate)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{_POLICY}"/>'
    yield "</svg>"


class _Frame:
    """Where a size and a rate are drawn."""

    def __init__(self, traffic: PlanTraffic) -> None:
        sizes = [sample.arena_bytes for sample in traffic.samples]
        sizes.append(traffic.planned.arena_bytes)
        self._first, self._last = math.log2(min(sizes)), math.log2(max(sizes))
        self.tenths = _tenths(traffic)

    def x(self, arena_bytes: int) -> float:
        part = (math.log2(arena_bytes) - self._first) / (self._last - self._first)
        return _LEFT + part * (_RIGHT - _LEFT)

    def y(self, rate: float) -> float:
        return _BOTTOM - rate * 10 / self.tenths * (_BOTTOM - _TOP)


def _axes(traffic: PlanTraffic, frame: _Frame) -> Iterator[str]:
    for tenth in range(frame.tenths + 1):
        rate = tenth / 10
        yield _line(_LEFT, frame.y(rate), _RIGHT, frame.y(rate), _GRID)
        yield _label(_LEFT - 8, frame.y(rate) + 4, f"{rate:.0%}", "end")
    for point in traffic.points:
        x = frame.x(point.arena_bytes)
        yield _line(x, _TOP, x, _BOTTOM, _GRID)
        yield _label(x, _BOTTOM + 18, size_text(point.arena_bytes), "middle")
    yield _label((_LEFT + _RIGHT) / 2, _BOTTOM + 36, "arena", "middle")


def _legend(number: int, name: str, colour: str) -> Iterator[str]:
    x, y = _LEFT + 200 * number, _HEIGHT - 8
    yield f'<rect x="{x}" y="{y - 9}" width="14" height="9" fill="{colour}"/>'
    yield _label(x + 20, y, name, "start")


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-dasharray="{dashes}"/>'


def _label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


# ---- PNG ---------------------------------------------------------------------------------------


def _figures() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise WorkloadError.PackageMissing("matplotlib", MATPLOTLIB_COMMAND) from None


def _write_png(plan: CapacityPlan, traffic: PlanTraffic, path: Path) -> None:
    figure = _figures().Figure(figsize=(_WIDTH / 100, _HEIGHT / 100), layout="constrained")
    axes = figure.subplots()
    sizes = [sample.arena_bytes for sample in traffic.samples]
    for name, colour, rates in _series(plan, traffic):
        axes.plot(sizes, _percent(rates), color=colour, label=name)
    marked = (*traffic.points, traffic.planned)
    axes.plot(
        [point.arena_bytes for point in marked],
        _percent(point.policy_rate for point in marked),
        "o",
        color=_POLICY,
        label=plan.geometry.eviction,
    )
    axes.axvline(traffic.planned.arena_bytes, color=_POLICY, linestyle="--", label="planned")
    axes.set_xscale("log", base=2)
    ticks = [point.arena_bytes for point in traffic.points]
    axes.set_xticks(ticks, [size_text(size) for size in ticks])
    axes.set(title=_title(plan), xlabel="arena", ylabel="% of block references", ylim=(0, None))
    axes.grid(visible=True, color=_GRID)
    axes.legend()
    figure.savefig(path, dpi=150)


def _percent(rates: Iterable[float]) -> list[float]:
    return [rate * 100 for rate in rates]
