"""The page of `kpt serve-bench`: its figures, and one line for each request from its arrival to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .._optimize.report.style import STYLE
from .trace import Arrival

_WIDTH, _LEFT, _ROW, _MOST_ROWS = 1000, 60, 14, 400


def _tile(name: str, figure: str, detail: str) -> str:
    return (
        f'<div class="tile"><dt>{escape(name)}</dt><dd><strong>{escape(figure)}</strong><br>{escape(detail)}</dd></div>'
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _plot(trace: Sequence[Arrival], seconds: float) -> str:
    shown = list(trace)[:_MOST_ROWS]
    height = _ROW * len(shown) + 40

    def across(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 10) * at / seconds

    parts = []
    for step in range(6):
        at = seconds * step / 5
        parts.append(
            f'<line x1="{across(at):.1f}" x2="{across(at):.1f}" y1="8" y2="{height - 26}" stroke="var(--line)"/>'
            f'<text x="{across(at):.1f}" y="{height - 8}" text-anchor="middle" fill="var(--soft)" font-size="12">'
            f"{at:.2f} s</text>"
        )
    for row, arrival in enumerate(shown):
        y = 14 + row * _ROW
        first, last = across(arrival.came[0]), across(arrival.came[-1])
        words = (
            f"request {row}: {arrival.prompt} tokens in, {len(arrival.came)} out, first after "
            f"{arrival.first_token * 1e3:.0f} ms"
        )
        parts.append(
            f"<g><title>{escape(words)}</title>"
            f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end" fill="var(--soft)" font-size="10">{row}</text>'
            f'<line x1="{across(arrival.at):.1f}" x2="{first:.1f}" y1="{y}" y2="{y}" stroke="var(--before)"'
            ' stroke-width="2" stroke-dasharray="3 3"/>'
            f'<rect x="{first:.1f}" y="{y - 4}" width="{max(2.0, last - first):.1f}" height="8" rx="2"'
            ' fill="var(--after)"/></g>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Requests over time" width="100%">'
        f"{''.join(parts)}</svg>"
    )


def page(title: str, found: dict[str, Any], trace: Sequence[Arrival]) -> str:
    first, each = found["first_token_seconds"], found["seconds_per_token"]
    tiles = [
        _tile(
            "New tokens",
            f"{found['new_tokens_per_second']:.0f} /s",
            f"{found['new_tokens']} in {found['seconds']:.2f} s",
        ),
        _tile("With prompts", f"{found['tokens_per_second']:.0f} /s", f"{found['prompt_tokens']} tokens of prompts"),
        _tile("To the first token", milliseconds(first["median"]), f"90 %: {milliseconds(first['p90'])}"),
    ]
    if each:
        tiles.append(_tile("Per token", milliseconds(each["median"]), f"90 %: {milliseconds(each['p90'])}"))
    hidden = len(trace) - _MOST_ROWS
    more = f" The last {hidden} requests are not drawn." if hidden > 0 else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f'<header><p class="kicker">kpt serve-bench</p><h1>{escape(title)}</h1></header><main>'
        f'<dl class="tiles">{"".join(tiles)}</dl><section><h2>Requests</h2><p class="say">Dashed: from arrival to the '
        f"first token. Filled: while tokens come.{more}</p>{_plot(trace, found['seconds'])}</section></main>"
        "</body></html>"
    )
