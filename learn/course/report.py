"""Tables for the terminal, a roofline as SVG, and one page with all results of this reader."""

from __future__ import annotations

import html
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .build import cache_folder
from .catalog import STEPS, Step
from .lines import Result, Row


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _rate(value: float) -> str:
    return f"{value / 1e12:.3g} T" if value >= 1e12 else f"{value / 1e9:.3g} G"


HEADER = ("", "time", "byte/s", "FLOP/s", "predicted", "measured / predicted")


def cells(row: Row) -> tuple[str, ...]:
    known = row.predicted is not None and row.predicted > 0
    return (
        row.name,
        _seconds(row.seconds),
        _rate(row.bytes / row.seconds) + "B",
        _rate(row.flops / row.seconds),
        _seconds(row.predicted) if row.predicted else "",
        f"{row.seconds / row.predicted:.2f}" if known and row.predicted else "",
    )


def table(rows: list[Row]) -> str:
    lines = [HEADER, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        )
        for line in lines
    )


def heading(step: Step) -> str:
    return f"Step {step.number}: {step.title}   [{step.path / 'README.md'}]"


def show(line: str) -> None:
    """What a step says before it runs: its problem, its roofs and its predictions, as they come."""
    kind, *words = line.split("\t")
    if kind == "problem":
        print(f"  {words[0]}", flush=True)
    elif kind == "roof":
        print(f"  roof       {words[0]}: {float(words[1]):.4g} {words[2]}", flush=True)
    elif kind == "predicted":
        print(f"  predicted  {words[0]}: {_seconds(float(words[1]))} = {words[2]}", flush=True)


def text(result: Result, earlier: list[Row]) -> str:
    out = []
    if result.rows:
        out.append(f"  must move  {result.rows[-1].bytes / 1e6:.4g} MB, and {result.rows[-1].flops / 1e9:.4g} GFLOP")
        out += ["", table([*earlier, *result.rows])]
    return "\n".join([*out, *(f"  {note}" for note in result.notes)])


# ---- what is kept ----


def _store() -> Path:
    return cache_folder() / "results.json"


def stored() -> dict[str, Any]:
    if not _store().exists():
        return {}
    found: dict[str, Any] = json.loads(_store().read_text())
    return found


def keep(step: Step, result: Result) -> None:
    """Remembers the last result of a step, for the page. Quick runs are not kept."""
    kept = stored()
    kept[str(step.number)] = {**asdict(result), "date": time.strftime("%Y-%m-%d")}
    _store().write_text(json.dumps(kept, indent=1))


# ---- the roofline ----


def _place(value: float, low: float, high: float, size: float) -> float:
    return (math.log10(value) - low) / (high - low) * size


def roofline(results: dict[str, Any]) -> str:
    """Measured points under the best rates that this reader's steps saw: bytes / s times intensity, and FLOP / s."""
    rows = [(number, row) for number, each in results.items() for row in each["rows"] if row["flops"] and row["bytes"]]
    if not rows:
        return ""
    groups = {False: [], True: []}  # type: dict[bool, list[tuple[str, dict[str, Any]]]]
    for number, row in rows:
        on_gpu = 7 <= int(number) <= 11 or row["name"].endswith("on the GPU") or "NVIDIA" in results[number]["problem"]
        groups[on_gpu].append((number, row))
    pictures = [
        _one_roofline(name, found, results) for name, found in (("CPU", groups[False]), ("GPU", groups[True])) if found
    ]
    return "\n".join(pictures)


def _best_roof(results: dict[str, Any], numbers: set[str], units: dict[str, float], name: str = "") -> float:
    found = [
        value * units[unit]
        for number, each in results.items()
        if number in numbers
        for roof, value, unit in each["roofs"]
        if unit in units and roof.startswith(name)
    ]
    return max(found, default=0.0)


def _one_roofline(title: str, rows: list[tuple[str, dict[str, Any]]], results: dict[str, Any]) -> str:
    width, height, margin = 640.0, 360.0, 60.0
    numbers = {number for number, _ in rows}
    bandwidth = _best_roof(results, numbers, {"GB/s": 1e9}, "copy")
    compute = _best_roof(results, numbers, {"GFLOP/s": 1e9, "TFLOP/s": 1e12})
    points = [(row["flops"] / row["bytes"], row["flops"] / row["seconds"], number, row["name"]) for number, row in rows]
    xs, ys = [p[0] for p in points], [p[1] for p in points] + ([compute] if compute else [])
    x0, x1 = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)) + 0.01)
    y0, y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 0.01)

    def at(x: float, y: float) -> tuple[float, float]:
        return margin + _place(x, x0, x1, width), margin + height - _place(y, y0, y1, height)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2 * margin:.0f} {height + 2 * margin:.0f}" '
        f'width="{width + 2 * margin:.0f}" role="img" font-family="sans-serif" font-size="11">',
        f"<title>Roofline of this machine: {title}</title>",
        f'<text x="{margin}" y="24" font-size="15">{title}: FLOP/s over FLOP per byte</text>',
        f'<rect x="{margin}" y="{margin}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
    ]
    for power in range(x0, x1 + 1):
        x, _ = at(10.0**power, 10.0**y0)
        parts.append(f'<text x="{x:.1f}" y="{margin + height + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(y0, y1 + 1):
        _, y = at(10.0**x0, 10.0**power)
        parts.append(f'<text x="{margin - 6}" y="{y + 4:.1f}" text-anchor="end">{_rate(10.0**power)}</text>')
    if bandwidth:
        line = []
        for i in range(101):
            x = 10.0 ** (x0 + (x1 - x0) * i / 100)
            y = min(bandwidth * x, compute) if compute else bandwidth * x
            if 10.0**y0 <= y <= 10.0**y1:
                px, py = at(x, y)
                line.append(f"{px:.1f},{py:.1f}")
        parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="#c33" stroke-width="2"/>')
    for x, y, number, name in points:
        px, py = at(x, y)
        parts.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="#236"><title>{html.escape(name)}</title></circle>'
        )
        parts.append(f'<text x="{px + 6:.1f}" y="{py + 4:.1f}">{number}</text>')
    return "\n".join([*parts, "</svg>"])


def page(results: dict[str, Any]) -> str:
    body = []
    for step in STEPS:
        kept = results.get(str(step.number))
        if kept is None:
            body.append(
                f"<h2>{step.number}. {html.escape(step.title)}</h2>"
                f"<p>Not run yet: <code>kpt learn {step.number}</code></p>"
            )
            continue
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(Row(**row))) + "</tr>"
            for row in kept["rows"]
        )
        roofs = "; ".join(f"{html.escape(name)} {value:.4g} {unit}" for name, value, unit in kept["roofs"])
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in kept["notes"])
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in HEADER)
        body.append(
            f"<h2>{step.number}. {html.escape(step.title)}</h2><p>{html.escape(kept['problem'])} ({kept['date']})</p>"
            f"<p>Roofs: {roofs}</p>{notes}<table><tr>{head}</tr>{rows}</table>"
        )
    style = (
        "body{font-family:sans-serif;max-width:60em;margin:2em auto}"
        "td,th{padding:.2em .8em;text-align:right}td:first-child{text-align:left}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>My kernels</title><style>{style}</style>'
        f"<h1>Predicted and measured on this machine</h1>{roofline(results)}{''.join(body)}</html>\n"
    )
