"""Attention masks as options: causal, a window, lengths of keys, padding; proven from the mask's formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from .affine import Difference, Mask, Reader
from .nodes import Node, same, shape

QUERY, KEY = -2, -1


@dataclass(frozen=True)
class Fold:
    """What a mask says. `offset`: query i sees keys up to i + offset (+ base). `left`: and not before that - left.

    `length`: (base, constant), keys from base + constant on are hidden. `padding`: nodes that stay masks.
    """

    causal: bool = False
    offset: Any = sympy.S.Zero
    base: Node | None = None
    left: int = -1
    length: tuple[Node, int] | None = None
    padding: tuple[Node, ...] = ()

    @property
    def is_plainly_causal(self) -> bool:
        return self.causal and self.base is None and self.offset == 0 and self.left < 0 and not self.has_extras

    @property
    def has_extras(self) -> bool:
        return self.length is not None or bool(self.padding)

    @property
    def keeps_everything(self) -> bool:
        return self == Fold()

    @property
    def is_band(self) -> bool:
        """Whether it is a window on both sides: a causal term that looks ahead, and one that looks back."""
        return self.causal and self.base is None and self.offset.is_Integer and 0 < self.offset <= self.left

    @property
    def text(self) -> str:
        parts = ["causal"] * (self.causal and not self.is_band) + ["window"] * (self.left >= 0)
        parts += ["key lengths"] * (self.length is not None or self.base is not None) + ["padding"] * bool(self.padding)
        return " + ".join(parts) or "keeps everything"


def fold(reader: Reader, node: Node) -> Fold | str:
    """What the mask says as options, or why it cannot be said so."""
    mask = reader.mask(node)
    if mask is True:
        return Fold()
    if mask is False:
        return "the mask hides everything"
    assert isinstance(mask, Mask)
    if not mask.conditions:
        return "the mask comes from outside the graph"
    if len(shape(node)) != 4:
        return "the mask has not four dimensions"
    for one in mask.opaque:
        if len(shape(one)) != 4 or not (same(shape(one)[QUERY], 1) and same(shape(one)[1], 1)):
            return "a term of the mask depends on queries and is no formula of positions"
    found = Fold(padding=mask.opaque)
    for condition in mask.conditions:
        step = _with_condition(found, condition)
        if isinstance(step, str):
            return step
        found = step
    return _checked(found, mask, node)


def _with_condition(found: Fold, condition: Difference) -> Fold | str:
    slopes = condition.slopes
    if any(dim not in (QUERY, KEY) for dim in slopes) or (condition.plus is not None and condition.minus is not None):
        return "the mask depends on heads, batches or several inputs"
    forward, backward = slopes.get(KEY, 0), slopes.get(QUERY, 0)
    values = vars(found)
    if (forward, backward) == (1, -1) and condition.plus is None:
        if found.causal:
            return "two causal terms"
        return Fold(**{**values, "causal": True, "offset": -condition.constant, "base": condition.minus})
    if (forward, backward) == (1, 0) and condition.minus is not None and condition.constant.is_Integer:
        if found.length is not None:
            return "two lengths"
        return Fold(**{**values, "length": (condition.minus, int(1 - condition.constant))})
    if (forward, backward) == (-1, 1) and condition.minus is None:
        return found  # a window: its distance is known once the causal term is
    return "a term of the mask is no causal, windowed or length term"


def _checked(found: Fold, mask: Mask, node: Node) -> Fold | str:
    for condition in mask.conditions:
        if (condition.slopes.get(KEY, 0), condition.slopes.get(QUERY, 0)) != (-1, 1):
            continue
        if not found.causal or condition.plus is not found.base:
            return "a window without its causal term"
        left = sympy.expand(found.offset - condition.constant)
        if not left.is_Integer or left < 0 or found.left >= 0:
            return "a window of no fixed length"
        found = Fold(**{**vars(found), "left": int(left)})
    if found.length is not None and (found.causal or found.left >= 0):
        return "a length besides a causal term"
    return found
