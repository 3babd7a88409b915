"""A report as one HTML file: no script, no network, nothing but itself, which its Content-Security-Policy enforces.

Every text of the data goes through `_text`. Tables hold all numbers that the drawings show, so that the page reads the
same by ear, on paper and without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from .numbers import Row, count_text, duration, grouped, percent, rate, ratio_text, roof_share, size, small
from .style import STYLE
from .svg import Point, bar, roofline, roofline_points

if TYPE_CHECKING:
    from .report import Report

__all__ = ["page"]

_SHOWN_KERNELS = 10
_SHOWN_ROWS = 40  # of a table; the rest unfolds
_SHOWN_PATHS = 3
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(report: Report) -> str:
    sections = [
        ("times", "Before and after", _times(report)),
        ("kernels", "Where the time goes", _kernels(report)),
        ("roofline", "Against the roofs", _roofline(report)),
        ("replaced", "What was replaced", _replaced(report)),
        ("tuned", "What was tuned", _tuned(report)),
        ("refused", "What was left alone, and why", _refused(report)),
        ("numbers", "How far the numbers moved", _numbers(report)),
        ("environment", "Environment", _environment(report)),
        ("again", "Run it again", _again(report)),
    ]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in sections)
    bodies = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{body}</section>'
        for name, title, body in sections
    )
    data, model = report.data, report.data["model"]
    inputs = f" on {', '.join(model['inputs'])}" if model["inputs"] else ""
    lead = (
        f"{model['name']}, {count_text(model['parameters'])} parameters{inputs}; "
        f"goal {data['goal']}, accuracy {data['accuracy']}"
    )
    version = data["environment"].get("kernel_pytorch", "")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{_text(data["title"])}</title><style>{STYLE}</style></head>
<body><header><p class="kicker">KernelPyTorch report</p><h1>{_text(data["title"])}</h1><p class="lead">{_text(lead)}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>{_tiles(report)}</header>
<main>
{bodies}
</main>
<footer>KernelPyTorch {_text(version)}. One file, no script, nothing loaded from elsewhere.</footer></body></html>
"""


def _text(value: Any) -> str:
    return escape(str(value), quote=True)


def _say(words: str) -> str:
    return f'<p class="say">{words}</p>'


def _time(microseconds: float) -> str:
    return _text(duration(microseconds, "µs"))


def _table(caption: str, headings: Iterable[str], rows: list[str]) -> str:
    """`rows` are ready <tr>s; a heading that begins with ">" stands over numbers. Long tables unfold."""
    head = "".join(
        f'<th scope="col"{" class=number" if title.startswith(">") else ""}>{title.lstrip(">")}</th>'
        for title in headings
    )
    begin = f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>'
    first = f"{begin}<caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows[:_SHOWN_ROWS])}"
    end = "</tbody></table></div>"
    rest = rows[_SHOWN_ROWS:]
    if not rest:
        return first + end
    more = f"{begin}<thead><tr>{head}</tr></thead><tbody>{''.join(rest)}{end}"
    return f"{first}{end}<details><summary>{len(rest)} more</summary>{more}</details>"


def _row(first: str, *cells: str) -> str:
    """Ready HTML; the first is the row's heading, one that begins with ">" is a number, a bar makes its column wide."""
    body = ""
    for cell in cells:
        style = ' class="number"' if cell.startswith(">") else ' class="wide"' if cell.startswith("<svg") else ""
        body += f"<td{style}>{cell.removeprefix('>')}</td>"
    return f'<tr><th scope="row">{first}</th>{body}</tr>'


def _known(value: Any, written: Callable[[Any], str]) -> str:
    """`value` as text, and a dash where it is unknown."""
    return "&ndash;" if value is None else _text(written(value))


def _plain(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _grouped_digits(value: int) -> str:
    return f"{value:,}"


def _path(path: str) -> str:
    return f'<span class="path">{_text(path)}</span>' if path else "the whole model"


def _paths(rows: list[Row]) -> str:
    """Where the same was done: the first few, the others folded."""
    items = [f"<li>{_path(row['path'])}</li>" for row in rows]
    first = f'<ul class="paths">{"".join(items[:_SHOWN_PATHS])}</ul>'
    rest = items[_SHOWN_PATHS:]
    if not rest:
        return first
    return f'{first}<details><summary>{len(rest)} more</summary><ul class="paths">{"".join(rest)}</ul></details>'


# ---- what one sees first ----


def _tile(name: str, figure: str, detail: str, style: str = "") -> str:
    body = f'<dt>{name}</dt><dd class="figure {style}">{figure}</dd><dd class="detail">{detail}</dd>'
    return f'<div class="tile">{body}</div>'


def _tiles(report: Report) -> str:
    tiles = [
        _time_tile(report),
        _change_tile("Peak memory", report, "peak_bytes", size),
        _change_tile("Kernel launches", report, "launches", _grouped_digits),
        _number_tile(report),
    ]
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _time_tile(report: Report) -> str:
    before, after, found = report.measurement("before"), report.measurement("after"), report.verdict()
    if not (before and after and found):
        return _tile("Time", "not measured", "")
    detail = f"{_time(before['median_us'])} → {_time(after['median_us'])}"
    if not report.is_changed:
        return _tile("Time", "as it was", f"nothing was replaced; measured {detail}")
    if not found.clear:
        return _tile("Time, no clear difference", ratio_text(found.ratio), f"{detail}, ranges overlap", "unclear")
    word, style = ("faster", "good") if found.ratio >= 1 else ("slower", "bad")
    return _tile(f"Time, {word}", ratio_text(found.ratio), detail, style)


def _change_tile(name: str, report: Report, field: str, written: Callable[[Any], str]) -> str:
    rows = [report.measurement(side) for side in ("before", "after")]
    values = [row[field] if row else None for row in rows]
    if values[0] is None or values[1] is None:
        return _tile(name, "not measured", "")
    style = "good" if values[1] < values[0] else "bad" if values[1] > values[0] else ""
    change = f", {100 * (values[1] / values[0] - 1):+.0f} %" if values[0] else ""
    return _tile(name, _text(written(values[1])), f"before {_text(written(values[0]))}{change}", style)


def _number_tile(report: Report) -> str:
    worst, rows = report.worst_numerics, report.data["numerics"]
    if worst is None:
        return _tile("Numbers", "not compared", "")
    failed = sum(not row["ok"] for row in rows)
    if failed:
        return _tile("Beyond tolerance", f"{failed} of {len(rows)}", f"worst {small(worst['relative'])}", "bad")
    return _tile("Largest difference", small(worst["relative"]), f"tolerance {small(worst['tolerance'])}", "good")


# ---- times ----


def _times(report: Report) -> str:
    rows = report.data["measurements"]
    if not rows:
        return _say("Nothing was measured.")
    longest = max(row["high_us"] for row in rows)
    body = []
    for row in rows:
        name = row["name"]
        found = report.verdict(name)
        against = "" if name == "before" or not found else ratio_text(found.ratio)
        if against and found and not found.clear:
            against += '<br><span class="unclear">unclear</span>'
        style = f"fill-{name}" if name in ("before", "after") else "fill-peer"
        body.append(
            _row(
                _text(name),
                f">{_time(row['median_us'])}",
                f">{_time(row['low_us'])} to {_time(row['high_us'])}",
                bar(row["median_us"], longest, style, row["low_us"], row["high_us"]),
                f">{against}",
                f">{_known(row['peak_bytes'], size)}",
                f">{_known(row['launches'], _grouped_digits)}",
                f">{row['samples']:,}",
            )
        )
    say = (
        "Medians of interleaved runs in one process; the line over a bar spans low to high. "
        "Where ranges overlap, the ratio is called unclear. "
        "Launches are kernels on a GPU, operators that compute on a CPU."
    )
    headings = ["", ">median", ">range", "", ">against before", ">peak memory", ">launches", ">samples"]
    return _say(say) + _table("Times", headings, body)


# ---- kernels ----


def _kernels(report: Report) -> str:
    kernels = report.data["kernels"]
    totals = {side: sum(row["total_us"] for row in kernels[side]) for side in ("before", "after")}
    if not any(total > 0 for total in totals.values()):
        return _say("No profile was taken.")
    longest = max(row["total_us"] for side in kernels.values() for row in side)
    sides = "".join(_kernel_list(side, kernels[side], totals[side], longest, report) for side in ("before", "after"))
    say = "Time on the device by kernel, one scale for both sides. Kernels of this library are marked ours."
    return _say(say) + f'<div class="sides">{sides}</div>'


def _kernel_list(side: str, kernels: list[Row], total: float, longest: float, report: Report) -> str:
    rows = sorted(kernels, key=lambda row: -row["total_us"])
    items = [_kernel_item(row, total, longest, report) for row in rows[:_SHOWN_KERNELS]]
    rest = rows[_SHOWN_KERNELS:]
    more = ""
    if rest:
        hidden = "".join(_kernel_item(row, total, longest, report) for row in rest)
        taken = sum(row["total_us"] for row in rest)
        summary = f"<summary>{len(rest)} more, {_time(taken)}</summary>"
        more = f'<details>{summary}<ul class="kernels">{hidden}</ul></details>'
    title = f"{side.capitalize()}: {_time(total)} in {sum(row['calls'] for row in rows):,} calls"
    return f'<div><h3>{title}</h3><ul class="kernels">{"".join(items)}</ul>{more}</div>'


def _kernel_item(row: Row, total: float, longest: float, report: Report) -> str:
    share = f", {percent(row['total_us'] / total)}" if total > 0 else ""
    reached = roof_share(row, report.data["roofs"])
    roof = f", {percent(reached)} of the roof" if reached is not None else ""
    tag = '<span class="tag">ours</span> ' if row["ours"] else ""
    calls = "1 call" if row["calls"] == 1 else f"{row['calls']:,} calls"
    return (
        f'<li><div class="row"><span class="name" title="{_text(row["name"])}">{tag}{_text(row["name"])}</span>'
        f'<span class="much" title="{calls}{roof}">{_time(row["total_us"])}{share}</span></div>'
        f"{bar(row['total_us'], longest, 'fill-ours' if row['ours'] else 'fill-other')}</li>"
    )


# ---- roofline ----

_KEY = (
    '<ul class="key">'
    '<li><svg aria-hidden="true"><circle class="solid" cx="7" cy="7" r="6"/></svg>after, ours</li>'
    '<li><svg aria-hidden="true"><rect class="gray" x="1" y="1" width="12" height="12" rx="2"/></svg>after, others</li>'
    '<li><svg aria-hidden="true"><rect class="hollow" x="1" y="1" width="12" height="12" rx="2"/></svg>before</li></ul>'
)


def _roofline(report: Report) -> str:
    roofs = report.data["roofs"]
    if roofs is None or min(roofs["copy_bytes_per_second"], roofs["matmul_flops_per_second"]) <= 0:
        return _say("The roofs of this device were not measured.")
    points = roofline_points(report.data["kernels"], roofs)
    measured = (
        f"Measured on this device: a copy moves {_text(rate(roofs['copy_bytes_per_second'], 'B'))}, a product in "
        f"{_text(roofs['dtype'])} computes {_text(rate(roofs['matmul_flops_per_second'], 'FLOP'))}."
    )
    if not points:
        return _say(f"{measured} No kernel's bytes and operations are known, so there is no point to draw.")
    say = _say(
        f"{measured} A kernel on the line does what the device can; above it, caches help. "
        "Bytes and operations are counted from shapes."
    )
    drawing = f'<div class="scroll" tabindex="0" role="region" aria-label="Roofline">{roofline(points, roofs)}</div>'
    rows = [_point_row(point) for point in sorted(points, key=lambda point: (point.number, point.side))]
    headings = ["no.", "side", "kernel", ">time", ">FLOP/byte", ">speed", ">bandwidth", ">of the roof"]
    table = _table("Points of the roofline", headings, rows)
    return f"{say}{drawing}{_KEY}<details><summary>The {len(points)} points as a table</summary>{table}</details>"


def _point_row(point: Point) -> str:
    kernel = point.kernel
    ours = ' <span class="tag">ours</span>' if kernel["ours"] else ""
    return _row(
        str(point.number),
        point.side,
        f"{_path(kernel['name'])}{ours}",
        f">{_time(kernel['total_us'])}",
        f">{point.intensity:.3g}",
        f">{_text(rate(point.flops_per_second, 'FLOP'))}",
        f">{_text(rate(kernel['bytes'] / kernel['total_us'] * 1e6, 'B'))}",
        f">{_known(point.share, percent)}",
    )


# ---- what happened to the model ----


def _replaced(report: Report) -> str:
    rows = report.data["replacements"]
    if not rows:
        return _say("Nothing.")
    body = []
    for group in grouped(rows, *(key for key in rows[0] if key != "path")):
        row = group[0]
        times = [row["predicted_us_before"], row["predicted_us_after"]]
        predicted = "&ndash;" if None in times else f"{_time(times[0])} → {_time(times[1])}"
        kernel = f'<br><span class="path">{_text(row["kernel"])}</span>' if row["kernel"] else ""
        what = f"{_text(row['from'])} → {_text(row['to'])}{kernel}"
        cells = [_text(row["pattern"]), what, f">{len(group)}", f">{predicted}", _text(row["reason"])]
        body.append(_row(_paths(group), *cells))
    say = (
        "Same parameters, same names, same state_dict; restore() undoes all of it. "
        "Predictions, of one part each, come from bytes, operations and launches against the roofs."
    )
    return _say(say) + _table("Replacements", ["where", "pattern", "what", ">parts", ">predicted", "why"], body)


def _tuned(report: Report) -> str:
    rows = report.data["tuning"]
    if not rows:
        return _say("Nothing: no problem with a choice between kernels took enough of the time, or tuning was off.")
    body = []
    for row in sorted(rows, key=lambda row: (not row["kept"], -row["share"])):
        times = f"{_known(row['from_us'], duration)} → {_known(row['to_us'], duration)}" if row["to"] else "&ndash;"
        change = f"{_path(row['from'])} → {_path(row['to'])}" if row["to"] else _path(row["from"])
        tag = '<span class="tag">taken</span> ' if row["kept"] else ""
        cells = [_path(row["problem"]), f">{row['calls']:,}", f">{percent(row['share'])}", change, f">{times}"]
        body.append(_row(_text(row["op"]), *cells, tag + _text(row["reason"])))
    say = (
        "Problems of a step that take enough of it and have several kernels or configs, measured on buffers of "
        "their own. What was faster alone was taken only if the whole was faster with it; restore() takes it back."
    )
    headings = ["op", "problem", ">calls", ">of the step", "kernel", ">time", "outcome"]
    return _say(say) + _table("Tuning", headings, body)


def _refused(report: Report) -> str:
    rows = report.data["refusals"]
    if not rows:
        return _say("Nothing: every pattern that was found was replaced.")
    groups = grouped(rows, "pattern", "reason")
    body = [_row(_paths(group), _text(group[0]["pattern"]), _text(group[0]["reason"])) for group in groups]
    return _table("Refusals", ["where", "pattern", "why"], body)


def _numbers(report: Report) -> str:
    rows = report.data["numerics"]
    if not rows:
        return _say("Nothing was compared.")
    body = []
    for row in sorted(rows, key=lambda row: (row["ok"], row["path"] != "")):  # failures, then the whole model, lead
        tolerance, relative = row["tolerance"], row["relative"]
        used = relative / tolerance if tolerance > 0 else (0.0 if relative == 0 else float("inf"))
        verdict = '<span class="tag">within</span>' if row["ok"] else '<span class="tag no">beyond</span>'
        body.append(
            _row(
                _path(row["path"]),
                _text(row["quantity"]),
                f">{small(row['max_abs'])}",
                f">{small(relative)}",
                f">{small(tolerance)}",
                bar(min(used, 1.0), 1.0, "fill-after" if row["ok"] else "fill-bad") if used == used else "",
                verdict,
            )
        )
    say = (
        "Original and replacement on the same inputs. Relative is the largest difference over the largest value; "
        "the bar is the share of the tolerance that was used."
    )
    headings = ["where", "quantity", ">largest", ">relative", ">tolerance", "used", ""]
    return _say(say) + _table("Differences", headings, body)


def _environment(report: Report) -> str:
    facts = "".join(
        f"<dt>{_text(key.replace('_', ' '))}</dt><dd>{_known(value, _plain)}</dd>"
        for key, value in report.data["environment"].items()
    )
    return f'<dl class="facts">{facts}</dl>'


def _again(report: Report) -> str:
    notes = "".join(f"<li>{_text(note)}</li>" for note in report.data["notes"])
    notes = f'<h3>Notes</h3><ul class="notes">{notes}</ul>' if notes else ""
    command = report.data["command"]
    if not command:
        return _say("There is no single command: the model was made by the caller's own code.") + notes
    say = _say("This command gives this report again, with the times of the day.")
    return f"{say}<pre>{_text(command)}</pre>{notes}"
