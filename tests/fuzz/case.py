"""A drawn call, what it should give, and what comes of running it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Reference = Callable[..., Any]
_TOLERANCES = Path(__file__).resolve().parents[2] / "kernel_pytorch" / "registry" / "tolerance.h"
_NAMES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Case:
    """Arguments of one call.

    Attributes:
        reference: of the same arguments, floating tensors being fp64; None: only `check` judges.
        check: of the outputs and the case; what is wrong with them, or None.
        refused: why the call must raise; "" where it must not; None where either is right.
        terms: how many numbers an output element sums.
        roundings: how many numbers of the outputs' type an output is made through.
        gradients: whether floating arguments that require a gradient are differentiated.
        precision: of the outputs, where something on the way is rounded to a coarser type than theirs.
        constants: options that refuse to require a gradient.
        least_top: of what magnitude the terms are whose sum may cancel to less.
        names: ops that a refusal may name besides the function.
    """

    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    reference: Reference | None = None
    check: Callable[[Any, Case], str | None] | None = None
    refused: str | None = ""
    terms: int = 1
    roundings: float = 1.0
    gradients: bool = True
    names: tuple[str, ...] = ()
    least_top: float = 0.0
    precision: torch.dtype | None = None
    constants: tuple[str, ...] = ()

    def tensors(self) -> list[Tensor]:
        return [value for value in (*self.args, *self.options.values()) if isinstance(value, Tensor)]

    def text(self) -> str:
        named = [(str(i), value) for i, value in enumerate(self.args)] + list(self.options.items())
        return ", ".join(f"{name}={_text_of(value)}" for name, value in named)


def _text_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:80]
    stored = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{str(value.dtype)[6:]}{list(value.shape)}{stored}{' grad' if value.requires_grad else ''}"


def read_tolerances() -> dict[torch.dtype, tuple[float, float, float]]:
    """(relative, absolute, least) by type: the table of registry/tolerance.h, which kernels are verified by."""
    row = re.compile(r"\{([^{},]+), ([^{},]+), ([^{},]+)\},\s*// (\w+)")
    found = {}
    for *numbers, name in row.findall(_TOLERANCES.read_text()):
        if name in _NAMES:
            values = [float.fromhex(n) if n.startswith("0x") else float(n) for n in numbers]
            found[_NAMES[name]] = (values[0], values[1], values[2])
    assert set(found) == set(_NAMES.values()), f"{_TOLERANCES} was not understood"
    return found


TOLERANCES = read_tolerances()


def coarsest(dtypes: list[torch.dtype]) -> torch.dtype:
    return max((dtype for dtype in dtypes if dtype in TOLERANCES), key=lambda dtype: TOLERANCES[dtype][0])


def difference(
    actual: Tensor, expected: Tensor, case: Case, what: str, precision: torch.dtype | None = None
) -> str | None:
    """What is wrong with `actual`, by the formula at the head of tolerance.h, or None.

    precision: to which it is right, where something on the way is rounded to a coarser type than its own.
    """
    if tuple(actual.shape) != tuple(expected.shape):
        return f"{what} has shape {list(actual.shape)}, expected {list(expected.shape)}"
    if not actual.is_floating_point():
        return None if torch.equal(actual, expected.to(actual.dtype)) else f"{what} differs"
    relative, absolute, least = TOLERANCES[precision or case.precision or actual.dtype]
    largest = torch.finfo(actual.dtype).max
    actual, wanted = actual.detach().double(), expected.detach().double()
    same = (actual == wanted) | (actual.isnan() & wanted.isnan())
    finite = wanted.isfinite()
    top = max(float(wanted[finite].abs().max()) if bool(finite.any()) else 0.0, case.least_top)
    if actual.numel() and absolute > 0:
        absolute *= max(1.0, math.sqrt(case.terms) / 32)
    bound = case.roundings * (relative * wanted.abs() + absolute * top) + least
    overflows = (actual == wanted.sign() * math.inf) & (wanted.abs() > largest * (1 - relative))
    wrong = ~(same | overflows | ((actual - wanted).abs() <= bound))
    if not bool(wrong.any()):
        return None
    worst = (actual - wanted).abs().masked_fill(~wrong, 0).nan_to_num(math.inf, math.inf)
    place = int(worst.argmax())
    return (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} wrong, e.g. {float(actual.reshape(-1)[place])!r} where "
        f"{float(wanted.reshape(-1)[place])!r} is right (largest {top:.3g})"
    )
