"""Verdicts on parts that no clock decides, in place of kernel_pytorch._optimize.choose.judge."""

from __future__ import annotations

from kernel_pytorch._optimize.verdicts import PartVerdict, judge


def take_first(ways, predicted_us):
    """The first way that computes what the original does."""
    return PartVerdict(next((index for index, clocks in enumerate(ways) if clocks), None))


def take_none(ways, predicted_us):
    return PartVerdict(None)


def by_clocks_alone(ways, predicted_us):
    """As the core judges, whatever the plan predicted."""
    return judge(ways, 0.0)
