"""What timings decide, asked of the core (C++, kernel_pytorch/plan/optimize/verdict.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _library
from .measure import Timing, sure_gain

__all__ = ["PartVerdict", "confirms_tuning", "faster", "judge", "pays"]

Comparison = tuple[Timing, Timing]  # before, after


@dataclass(frozen=True)
class PartVerdict:
    """The way to keep, or None; where None, one that may be faster by less than the part's clock can tell.

    `costs_calls`: the way takes less of the device's time and more of the host's, so the whole decides.
    """

    way: int | None
    maybe: int | None = None
    costs_calls: bool = False


def pays(before: Timing, after: Timing) -> bool:
    """Whether a change of the whole is faster beyond doubt, as the report would call it."""
    return bool(_whole(before, after)["pays"])


def faster(before: Timing, after: Timing) -> bool:
    """Whether the whole is faster, by however little, beyond doubt."""
    return bool(_whole(before, after)["is_faster"])


def confirms_tuning(before: Timing, after: Timing, expected_us: float) -> bool:
    """Whether the whole saves enough of what its tuned problems save by themselves."""
    return bool(_whole(before, after, expected_us)["confirms_tuning"])


def judge(ways: Sequence[Sequence[Comparison]], predicted_us: float) -> PartVerdict:
    """Of the ways of replacing one part, each by its clocks, the one that decides first; none for a way that is wrong.

    `predicted_us` is what the plan says that the part saves.
    """
    clocks = [{"clocks": [_comparison(*one) for one in way]} for way in ways]
    found = _library.call("part_verdict", request={"ways": clocks, "predicted_us": predicted_us})
    way, maybe = (None if found[name] < 0 else int(found[name]) for name in ("way", "maybe"))
    return PartVerdict(way, maybe, bool(found["costs_calls"]))


def _whole(before: Timing, after: Timing, expected_us: float = 0.0) -> Any:
    return _library.call("whole_verdict", request={**_comparison(before, after), "expected_us": expected_us})


def _comparison(before: Timing, after: Timing) -> dict[str, Any]:
    timings = {
        name: {"median_us": one.median_us, "low_us": one.low_us, "high_us": one.high_us}
        for name, one in (("before", before), ("after", after))
    }
    return {**timings, "sure_gain": sure_gain(before, after)}
