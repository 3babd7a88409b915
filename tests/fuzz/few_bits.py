"""Weights in few bits: codes, their values, and products with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case
from .draw import Draw
from .elementwise import FUNCTIONS
from .run import generates

# By format: sizes of groups, and how far a value may move relative to the largest of its group: half of the widest
# step, or what saturates where the scale is a power of two.
FORMATS = {
    "nvfp4": ((16,), 1 / 6),
    "mxfp4": ((32,), 1 / 4),
    "mxfp8": ((32,), 1 / 8),
    **{f"int{bits}": ((32, 64, 128), 1 / (2**bits - 2)) for bits in (2, 3, 4, 5, 6, 8)},
}


def _options(d: Draw) -> dict[str, Any]:
    format = d.choice(list(FORMATS))
    options: dict[str, Any] = {"format": format, "group": d.choice(FORMATS[format][0])}
    if format.startswith("int"):
        options["asymmetric"] = d.maybe(0.4)
    return options


def _weight(d: Draw) -> Tensor:
    return d.tensor([d.size(60), d.size(300)], d.dtype(double=False), scale=d.choice((1.0, 1e-3, 100.0)))


def _bound(weight: Tensor, options: dict[str, Any]) -> Tensor:
    """How far a value may be from its code's: a share of its group's largest magnitude, and the rounding of a scale."""
    rows, columns = weight.shape
    if not weight.numel():
        return weight.double()
    group = options["group"]
    padded = torch.nn.functional.pad(weight.double().abs(), (0, -columns % group)).reshape(rows, -1, group)
    largest = padded.amax(-1, keepdim=True).expand_as(padded).reshape(rows, -1)[:, :columns]
    doubled = 2 if options.get("asymmetric") else 1
    return largest * FORMATS[options["format"]][1] * doubled * 1.1 + 1e-7


@generates("quantize_weight", "dequantize_weight")
def quantize_weight(d: Draw, name: str) -> Case:
    weight, options = _weight(d), _options(d)
    if name == "dequantize_weight":
        coded = F.quantize_weight(weight, **options)
        check = lambda values, case: _check(values, weight, options)  # noqa: E731
        return Case((coded, torch.float32), {}, check=check, gradients=False, names=("quantize_weight",))
    check = lambda made, case: _check(made.dequantize(torch.float32), weight, options)  # noqa: E731
    case = Case((weight,), options, check=check, gradients=False, names=("group_quantize",))
    if d.maybe(0.1):
        way = d.between(0, 2)
        if way == 0:
            case.options["format"], case.refused = "fp5", "the format is unknown"
        elif way == 1:
            case.options["group"], case.refused = 48, "no format has such groups"
        else:
            case.args, case.refused = (weight.double(),), "the weight is fp64"
    return case


def _check(values: Tensor, weight: Tensor, options: dict[str, Any]) -> str | None:
    if values.shape != weight.shape:
        return f"the shape is {tuple(values.shape)}"
    off = (values.double() - weight.double()).abs() - _bound(weight, options)
    return f"a value is off by {float(off.max())} too much" if off.numel() and bool((off > 0).any()) else None


@generates("quantized_matmul")
def quantized_matmul(d: Draw, name: str) -> Case:
    weight, options = _weight(d), _options(d)
    coded = F.quantize_weight(weight, **options)
    rows, columns = weight.shape
    x = d.tensor([*d.choice(([], [3], [2, 5], [40])), columns], weight.dtype)
    kind = d.some(d.choice(("gelu", "silu", "relu")))
    told: dict[str, Any] = {"activation": kind}
    bias = d.some(d.tensor([rows], weight.dtype))
    if bias is not None:
        told["bias"] = bias
    values = coded.dequantize(weight.dtype).double()

    def reference(x: Tensor, coded: Any, activation: str | None = None, bias: Tensor | None = None) -> Tensor:
        v = x @ values.t()
        v = v if bias is None else v + bias
        return v if activation is None else FUNCTIONS[activation](v)

    top = float(values.abs().max()) if values.numel() else 0.0
    # Few rows may meet a CPU's integers before these are rounded to a type of 16 bits; a slope of silu magnifies that.
    is_before_rounding = options["format"].startswith("int") and x.numel() <= 4 * columns
    roundings = 9 if is_before_rounding else 3
    case = Case((x, coded), told, reference=reference, terms=max(1, columns), roundings=roundings, least_top=top)
    if d.maybe(0.05):
        case.args, case.refused = (x[..., :-1], coded), "x has another number of columns"
    return case


@generates("int8_matmul")
def int8_matmul(d: Draw, name: str) -> Case:
    rows, columns = d.size(40), d.size(300)
    dtype, group = d.dtype(double=False), d.choice((0, 32, 64, 128))
    groups = 1 if group == 0 else -(-columns // group)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, groups) * 0.01
    each = scales.repeat_interleave(group or max(columns, 1), 1)[:, :columns].double()
    values = codes.double() * each
    x = d.tensor([*d.choice(([], [3], [2, 5], [40])), columns], dtype)
    step = x.double().abs().amax(-1, keepdim=True) / 127 if columns else x.double().sum(-1, keepdim=True)
    told: dict[str, Any] = {"activation": d.some(d.choice(("gelu", "silu")))}
    bias = d.some(d.tensor([rows], dtype))
    if bias is not None:
        told["bias"] = bias

    def check(made: Tensor, case: Case) -> str | None:
        rounded = torch.where(step > 0, (x.double() / step).round(), 0.0) * step
        v = rounded @ values.t()
        v = v if bias is None else v + bias.double()
        v = v if told["activation"] is None else FUNCTIONS[told["activation"]](v)
        # One code more or less where a quotient is almost a tie, for all that may be.
        bound = step * values.abs().amax(1, keepdim=True).t() * 3 if values.numel() else torch.zeros_like(v)
        off = (made.double() - v).abs() - bound - 2.0 ** (-7 if dtype is not torch.float32 else -16) * (1 + v.abs())
        return f"a value is off by {float(off.max())} too much" if off.numel() and bool((off > 0).any()) else None

    case = Case((x, codes, scales), told, check=check, gradients=False)
    if d.maybe(0.1):
        case.args, case.refused = (x, codes.int(), scales), "the weight is int32"
    return case


@generates("quantized_grouped_matmul")
def quantized_grouped_matmul(d: Draw, name: str) -> Case:
    options, groups, lines, columns = _options(d), d.between(1, 6), d.size(24), d.size(200)
    dtype, rows = d.dtype(double=False), d.size(50)
    coded = F.quantize_weight(d.tensor([groups * lines, columns], dtype), **options)
    values = coded.dequantize(dtype).double().view(groups, lines, columns)
    ends = torch.sort(torch.randint(0, rows + 1, (groups,), dtype=torch.int32)).values
    x = d.tensor([rows, columns], dtype)
    told: dict[str, Any] = {"activation": d.choice((None, "silu"))}
    bias = d.some(d.tensor([groups, lines], dtype))
    if bias is not None:
        told["bias"] = bias

    def reference(
        x: Tensor, coded: Any, ends: Tensor, activation: str | None = None, bias: Tensor | None = None
    ) -> Tensor:
        parts, begin = [], 0
        for group, end in enumerate(ends.tolist()):
            v = x[begin:end] @ values[group].t()
            v = v if bias is None else v + bias[group]
            parts.append(v if activation is None else FUNCTIONS[activation](v))
            begin = end
        return torch.cat([*parts, x.new_zeros(len(x) - begin, lines)])

    top = float(values.abs().max()) if values.numel() else 0.0
    case = Case((x, coded, ends), told, reference=reference, terms=max(1, columns), roundings=3, least_top=top)
    if d.maybe(0.05):
        case.args, case.refused = (x[..., :-1], coded, ends), "x has another number of columns"
    return case
