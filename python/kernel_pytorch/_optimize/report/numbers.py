"""What a report's text and its page both say about the numbers: units, and verdicts that admit what is not clear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Row",
    "Verdict",
    "count_text",
    "duration",
    "grouped",
    "percent",
    "rate",
    "ratio_text",
    "roof_share",
    "size",
    "small",
    "verdict",
]

Row = dict[str, Any]
_ROUNDING = 0.05  # of two measurements of the same speed


def _scaled(value: float, units: Sequence[str], step: float) -> str:
    """Three significant digits and the unit that keeps them short."""
    if not math.isfinite(value):
        return str(value)
    index = 0
    while abs(value) >= 0.9995 * step and index + 1 < len(units):
        value /= step
        index += 1
    value = float(f"{value:.2e}")
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) >= 0.01 else 2
    return f"{value:.{digits}f} {units[index]}"


def duration(microseconds: float, micro: str = "us") -> str:
    """12.3 us, 4.56 ms, 1.23 s."""
    return _scaled(microseconds, [micro, "ms", "s"], 1000)


def size(count: float) -> str:
    """Bytes in the units of memory: 1.50 GiB."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    return _scaled(count, ["B", "KiB", "MiB", "GiB", "TiB"], 1024)


def rate(per_second: float, unit: str) -> str:
    """4.80 TB/s, 990 TFLOP/s."""
    return _scaled(per_second, [f"{prefix}{unit}/s" for prefix in ("", "k", "M", "G", "T", "P")], 1000)


def count_text(count: int) -> str:
    """6.74 B, 124 M: for numbers of parameters."""
    if abs(count) < 1000:
        return str(count)
    return _scaled(count, ["", "K", "M", "B", "T"], 1000)


def small(value: float) -> str:
    """A difference: 0, 1.2e-6, 1e-2, nan."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def percent(share: float) -> str:
    """58 %, and < 1 % rather than 0 % for what is there."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}x"


@dataclass(frozen=True)
class Verdict:
    """How one measurement stands to another."""

    ratio: float  # times as fast as the other
    clear: bool  # the ranges of both do not overlap

    @property
    def words(self) -> str:
        if not self.clear:
            return f"no clear difference ({ratio_text(self.ratio)}, within the spread)"
        if self.ratio >= 1:
            return f"{ratio_text(self.ratio)} as fast"
        return f"slower: {ratio_text(self.ratio)} as fast"


def verdict(before: Row, after: Row) -> Verdict | None:
    """None where a time is not a positive number, so nothing can be said."""
    times = (before["median_us"], after["median_us"])
    if not all(math.isfinite(time) and time > 0 for time in times):
        return None
    clear = after["high_us"] < before["low_us"] or before["high_us"] < after["low_us"]
    return Verdict(times[0] / times[1], clear)


def roof_share(kernel: Row, roofs: Row | None) -> float | None:
    """The time that the measured roofs allow for this kernel's bytes and flops, over the time it took.

    `bytes` and `flops` are, as `total_us`, of all its calls. None where that is more than the roofs allow: caches
    served what the roof counts as memory, or products of FP8 stand under the roof of the model's own type.
    """
    if roofs is None or kernel["total_us"] <= 0:
        return None
    limits = [
        (kernel["bytes"], roofs["copy_bytes_per_second"]),
        (kernel["flops"], roofs["matmul_flops_per_second"]),
    ]
    seconds = [amount / roof for amount, roof in limits if amount and roof > 0]
    share = max(seconds) * 1e6 / kernel["total_us"] if seconds else None
    return None if share is None or share > 1.0 + _ROUNDING else min(share, 1.0)


def grouped(rows: list[Row], *keys: str) -> list[list[Row]]:
    """Rows that agree in all of `keys`, in the order in which each group began."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())
