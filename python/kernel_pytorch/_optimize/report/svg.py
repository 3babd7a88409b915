"""The charts of a report as inline SVG: bars that stretch with their column, and the roofline.

Colours are CSS classes of the page, so that one drawing serves the light and the dark scheme. Shape and text carry what
colour says: before is hollow, after is filled, ours is a disc and others' kernels are squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from .numbers import Row, duration, percent, rate, roof_share

__all__ = ["Point", "bar", "roofline", "roofline_points"]

_WIDTH, _HEIGHT = 860, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 98, 20, 22, 48
_MOST_POINTS = 14  # of a side; what takes less time than these would only cover them


def bar(value: float, longest: float, style: str, low: float | None = None, high: float | None = None) -> str:
    """A bar of value / longest of the width; with `low` and `high` a whisker over its end. Hidden from screen readers:
    the number stands beside it."""
    if not (math.isfinite(value) and math.isfinite(longest) and longest > 0):
        return ""
    percent = max(0.0, min(100.0, 100 * value / longest))
    parts = [f'<rect class="{style}" width="{percent:.2f}%" height="100%" rx="3"/>']
    if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
        ends = [max(0.0, min(100.0, 100 * end / longest)) for end in (low, high)]
        parts.append(
            f'<line class="whisker" x1="{ends[0]:.2f}%" x2="{ends[1]:.2f}%" y1="50%" y2="50%"/>'
            + "".join(f'<line class="whisker" x1="{x:.2f}%" x2="{x:.2f}%" y1="25%" y2="75%"/>' for x in ends)
        )
    return f'<svg class="bar" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'


@dataclass(frozen=True)
class Point:
    """A kernel on the roofline. Both sides of one kernel share a number."""

    number: int
    side: str
    kernel: Row
    intensity: float  # flops per byte
    flops_per_second: float
    share: float | None


def roofline_points(kernels: dict[str, list[Row]], roofs: Row | None) -> list[Point]:
    """The kernels whose bytes and flops are known, longest first, numbered by name."""
    numbers: dict[str, int] = {}
    points = []
    for side in ("after", "before"):
        known = [row for row in kernels[side] if row["bytes"] and row["flops"] and row["total_us"] > 0]
        for row in sorted(known, key=lambda row: -row["total_us"])[:_MOST_POINTS]:
            number = numbers.setdefault(row["name"], len(numbers) + 1)
            speed = row["flops"] / row["total_us"] * 1e6
            points.append(Point(number, side, row, row["flops"] / row["bytes"], speed, roof_share(row, roofs)))
    return points


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis over whole decades, onto `begin` to `end` in the drawing."""

    low: int
    high: int
    begin: float
    end: float

    @staticmethod
    def over(values: list[float], begin: float, end: float) -> _Axis:
        low = math.floor(math.log10(min(values)))
        high = max(low + 1, math.ceil(math.log10(max(values)) + 0.05))
        return _Axis(low, high, begin, end)

    def at(self, value: float) -> float:
        return self.begin + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.begin)

    def decades(self) -> list[float]:
        step = max(1, (self.high - self.low) // 7)
        return [10.0**power for power in range(self.low, self.high + 1, step)]


def roofline(points: list[Point], roofs: Row) -> str:
    """Flops per second over flops per byte, both logarithmic, under the two roofs that were measured."""
    memory, compute = roofs["copy_bytes_per_second"], roofs["matmul_flops_per_second"]
    ridge = compute / memory
    across = _Axis.over([ridge / 20, ridge * 4, *(point.intensity for point in points)], _LEFT, _WIDTH - _RIGHT)
    up = _Axis.over(
        [10**across.low * memory * 2, compute, *(point.flops_per_second for point in points)], _HEIGHT - _BOTTOM, _TOP
    )
    roof = _roofs(across, up, memory, compute, roofs["dtype"])
    # Before lies below after, so that what was reached covers what was left.
    marks = [_mark(point, across, up) for point in sorted(points, key=lambda point: point.side, reverse=True)]
    caption = (
        f"{len(points)} points under a memory roof of {escape(rate(memory, 'B'))} and a compute roof of "
        f"{escape(rate(compute, 'FLOP'))}; the table below has the numbers."
    )
    return (
        f'<svg class="roofline" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="drawn-title drawn-text">'
        f'<title id="drawn-title">Roofline</title><desc id="drawn-text">{caption}</desc>'
        f"{_grid(across, up)}{roof}{''.join(marks)}</svg>"
    )


def _grid(across: _Axis, up: _Axis) -> str:
    parts = []
    for value in across.decades():
        x = across.at(value)
        label = f"{value:g}"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{label}</text>')
    for value in up.decades():
        y = up.at(value)
        # "1.00 TFLOP/s" as "1 TFLOP/s": a decade needs no digits
        label = rate(value, "FLOP").replace(".00", "").replace(".0", "")
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">FLOP per byte</text>')
    return "".join(parts)


def _roofs(across: _Axis, up: _Axis, memory: float, compute: float, dtype: str) -> str:
    ridge = compute / memory
    first, last = 10.0**across.low, 10.0**across.high
    corners = [(first, first * memory), (ridge, compute), (last, compute)]
    line = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in corners)
    bottom = _HEIGHT - _BOTTOM
    area = f"{line} {across.at(last):.1f},{bottom} {across.at(first):.1f},{bottom}"
    # The label of the slope stands on it, turned as it is, at its foot, where few kernels are.
    start = (across.at(first), up.at(first * memory))
    end = (across.at(ridge), up.at(compute))
    angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
    x, y = start[0] + (end[0] - start[0]) * 0.22, start[1] + (end[1] - start[1]) * 0.22
    return (
        f'<polygon class="under" points="{area}"/><polyline class="roof" points="{line}"/>'
        f'<text class="roof-name" text-anchor="middle" transform="translate({x:.1f} {y - 9:.1f}) rotate({angle:.1f})">'
        f"copy, {escape(rate(memory, 'B'))}</text>"
        f'<text class="roof-name" text-anchor="end" x="{_WIDTH - _RIGHT - 6}" y="{end[1] - 8:.1f}">'
        f"{escape(dtype)} product, {escape(rate(compute, 'FLOP'))}</text>"
    )


def _mark(point: Point, across: _Axis, up: _Axis) -> str:
    x, y = across.at(point.intensity), up.at(point.flops_per_second)
    style = f"point {point.side} {'ours' if point.kernel['ours'] else 'other'}"
    share = "" if point.share is None else f", {percent(point.share)} of the roof"
    caption = f"{point.side}: {point.kernel['name']}, {duration(point.kernel['total_us'], 'µs')}{share}"
    if point.kernel["ours"]:
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
    else:
        shape = f'<rect x="{x - 8:.1f}" y="{y - 8:.1f}" width="16" height="16" rx="3"/>'
    return (
        f'<g class="{style}"><title>{escape(caption)}</title>{shape}'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{point.number}</text></g>'
    )
