"""What a timed way is summed up as: quartiles of its turns, never a best. Free of any framework."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Timing:
    median_us: float
    p25_us: float
    p75_us: float
    turns: int


def summarised(samples_us: Sequence[float]) -> Timing:
    p25, median, p75 = statistics.quantiles(samples_us, n=4)
    return Timing(median, p25, p75, len(samples_us))
