"""FP8: codes, their scales, what is made on the way, and products of codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case, difference
from .draw import Draw
from .elementwise import FUNCTIONS, GATES
from .run import generates

# By format: the largest number, half a step relative to a number, half the smallest step.
FORMATS = {torch.float8_e4m3fn: (448.0, 2.0**-4, 2.0**-10), torch.float8_e5m2: (57344.0, 2.0**-3, 2.0**-17)}
GRANULARITIES = ("tensor", "row", "1x128", "128x128")


def _options(d: Draw) -> dict[str, Any]:
    granularity = d.choice(GRANULARITIES)
    options: dict[str, Any] = {
        "dtype": d.choice(list(FORMATS)),
        "granularity": granularity,
        "margin": d.choice((0, 0, 2)),
        "power_of_two": d.maybe(0.3),
        "transposed": d.maybe(),
        "amax": torch.zeros(1),
        "found_nonfinite": torch.zeros(1),
    }
    if granularity == "tensor" and d.maybe(0.3):
        options["scale"] = torch.tensor([d.choice((1.0, 0.01, 3.0))])
    if granularity == "1x128" and options["transposed"]:
        options["square_transpose"] = d.maybe(0.3)
    return options


def _spoil(d: Draw, case: Case) -> Case:
    if not d.maybe(0.12):
        return case
    way = d.between(0, 4)
    if way == 0:
        case.options["granularity"], case.refused = "2x2", "the granularity is unknown"
    elif way == 1:
        case.options["dtype"], case.refused = torch.int8, "the type is no FP8"
    elif way == 2:
        case.args, case.refused = (case.args[0][None], *case.args[1:]), "x is no matrix"
    elif way == 3:
        case.options["margin"], case.refused = d.choice((-33, 1000, 2**40)), "the margin is out of range"
    else:
        case.options["amax"], case.refused = torch.zeros(2), "amax has two elements"
    return case


def spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales as one for each element."""
    scales = scales.double()
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, columns)
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(128, 1)[:, :columns]
    if scales.shape[0] != rows:
        scales = scales.repeat_interleave(128, 0)[:rows]
    return scales.expand(rows, columns)


def check_codes(codes: Any, scales: Tensor, values: Tensor, options: dict[str, Any], slack: float = 0.0) -> str | None:
    """Codes are the values divided by their scales, rounded and saturated. `slack` is of the values."""
    if codes is None or values.numel() == 0:
        return None
    largest, half_step, half_least = FORMATS[options["dtype"]]
    factors = spread(scales, *values.shape)
    wanted = (values / factors).clamp(-largest, largest)
    off = (codes.double() - wanted).abs()
    bound = (half_step * 1.001 + slack) * wanted.abs() + half_least * 1.001 + slack * 10
    if slack:  # made in a type of its own first, whose smallest step is fp16's at most
        bound = bound + 2.0**-24 / factors
    return None if bool((off <= bound).all()) else f"codes are off by {float((off - bound).max())} and more"


def _check_scales(scales: Tensor, values: Tensor, options: dict[str, Any], slack: float) -> str | None:
    if "scale" in options or values.numel() == 0:
        return None
    largest = FORMATS[options["dtype"]][0]
    top = (
        spread(scales, *values.shape) * largest - values.abs() * 2.0 ** options["margin"]
    ) / values.abs().max().clamp_min(1e-30)
    if bool((top < -(1e-5 + 2 * slack) * 2.0 ** options["margin"]).any()):
        return "a scale is too small for what it scales"
    if options["power_of_two"] and bool((scales.float().log2() != scales.float().log2().round()).any()):
        return "a scale is no power of two"
    return None


def _check_quantized(made: Any, values: Tensor, options: dict[str, Any], slack: float = 0.0) -> str | None:
    wrong = check_codes(made.codes, made.scales, values, options, slack)
    wrong = wrong or _check_scales(made.scales, values, options, slack)
    if not wrong and options["transposed"]:
        wrong = check_codes(made.transposed, made.transposed_scales, values.t(), options, slack)
        wrong = f"transposed: {wrong}" if wrong else None
    amax = float(values.abs().max()) if values.numel() else 0.0
    if not wrong and abs(float(options["amax"]) - amax) > (1e-6 + slack) * amax:
        wrong = f"amax is {float(options['amax'])}, the largest magnitude {amax}"
    return wrong or ("found_nonfinite is set" if float(options["found_nonfinite"]) else None)


@generates("quantize")
def quantize(d: Draw, name: str) -> Case:
    x = d.tensor([d.size(300), d.size(300)], d.dtype(double=False), scale=d.choice((1.0, 1e-3, 100.0)))
    case = Case((x,), _options(d), check=lambda made, case: _check_quantized(made, x.double(), case.options))
    case.gradients = False
    if d.maybe(0.05):
        case.args, case.refused = (x.double(),), "x is fp64"
        return case
    return _spoil(d, case)


SLACK = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@generates("rms_norm_quantized")
def rms_norm_quantized(d: Draw, name: str) -> Case:
    shape, dtype = [d.size(200), d.size(300, empty=0.0)], d.dtype(double=False)
    x, weight = d.tensor(shape, dtype), d.some(d.tensor([shape[1]], dtype))
    options = {**_options(d), "weight_offset": d.choice((0.0, 1.0)), "with_output": d.maybe()}
    residual = d.some(d.tensor(shape, dtype), 0.4)
    if residual is not None:
        options["residual"] = residual

    def check(made: Any, case: Case) -> str | None:
        total = x.double() if residual is None else (x.double() + residual.double()).to(dtype).double()
        values = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        values = values if weight is None else values * (weight.double() + options["weight_offset"])
        wrong = difference(made.output, values, case, "the output") if options["with_output"] else None
        return wrong or _check_quantized(made.quantized, values, options, SLACK[dtype])

    case = Case((x, weight), options, check=check, gradients=False, roundings=4, names=("quantize", "rms_norm"))
    return _spoil(d, case)


@generates("gated_activation_quantized", "gated_activation_backward_quantized")
def gate_quantized(d: Draw, name: str) -> Case:
    is_backward = "backward" in name
    shape, dtype, kind = [d.size(200), d.size(150)], d.dtype(double=False), d.choice(GATES[:4])
    tensors = [d.tensor(shape, dtype) for _ in range(3 if is_backward else 2)]
    options = {**_options(d), "with_output": d.maybe()}

    def check(made: Any, case: Case) -> str | None:
        gate, up = (x.double().requires_grad_() for x in tensors[-2:])
        values = FUNCTIONS[kind](gate) * up
        if is_backward:
            values = torch.cat(torch.autograd.grad(values, (gate, up), tensors[0].double()), 1)
        values = values.detach()
        wrong = difference(made.output, values, case, "the output") if options["with_output"] else None
        return wrong or _check_quantized(made.quantized, values, options, SLACK[dtype])

    names = ("quantize", "gated_activation")
    case = Case((*tensors, kind), options, check=check, gradients=False, roundings=4, names=names)
    if d.maybe(0.06):
        case.args, case.refused = (*tensors[:-1], d.tensor(d.wrong_size(shape), dtype), kind), "shapes differ"
        return case
    return _spoil(d, case)


@generates("dequantize")
def dequantize(d: Draw, name: str) -> Case:
    granularity, code = d.choice(GRANULARITIES), d.choice(list(FORMATS))
    made = F.quantize(d.normal([d.size(200), d.size(300)], torch.float32), granularity=granularity, dtype=code)
    codes, scales = made.codes, made.scales
    dtype = d.choice((torch.float32, torch.bfloat16, torch.float16))

    def check(output: Tensor, case: Case) -> str | None:
        return difference(output, codes.double() * spread(scales, *codes.shape), case, "values")

    case = Case((codes, scales, dtype), {}, check=check, gradients=False)
    if d.maybe(0.1):
        case.args, case.refused = (codes, torch.ones(codes.shape[0] + 150, 5), dtype), "scales have another shape"
    return case


@generates("scaled_matmul")
def scaled_matmul(d: Draw, name: str) -> Case:
    m, n, k = d.size(150), d.size(150), d.size(300)
    kinds = [d.choice(GRANULARITIES) for _ in range(2)]
    a, b = (
        F.quantize(d.normal([rows, k], torch.float32), granularity=kind, dtype=d.choice(list(FORMATS)))
        for rows, kind in ((m, kinds[0]), (n, kinds[1]))
    )
    dtype = d.choice((torch.float32, torch.bfloat16, torch.float16))
    bias = d.some(d.tensor([n], d.choice((torch.float32, dtype)), dense=True))

    def check(output: Tensor, case: Case) -> str | None:
        left, right = (made.codes.double() * spread(made.scales, *made.codes.shape) for made in (a, b))
        wanted = left @ right.t()
        return difference(output, wanted if bias is None else wanted + bias.double(), case, "the product")

    options = {"bias": bias, "dtype": dtype, "accurate": d.maybe()}
    case = Case((a.codes, b.codes, a.scales, b.scales), options, check=check, gradients=False, terms=max(k, 1))
    if d.maybe(0.12):
        way = d.between(0, 3)
        if way == 0:
            case.options["dtype"], case.refused = torch.int8, "the type is none of a product"
        elif way == 1:
            case.args = (a.codes, F.quantize(torch.ones(n, k + 1)).codes, a.scales, b.scales)
            case.refused = "k differs"
        elif way == 2:
            case.args, case.refused = (a.codes, b.codes, torch.ones(m + 3, 2), b.scales), "scales have another shape"
        else:
            case.args, case.refused = (a.codes.float(), b.codes, a.scales, b.scales), "a holds no codes"
    return case


@generates("scaled_grouped_matmul")
def scaled_grouped_matmul(d: Draw, name: str) -> Case:
    rows, n, k, groups = d.size(60), d.size(150), max(1, d.size(300)), d.between(1, 5)
    gathers, source = d.maybe(0.4), max(1, d.size(30))
    kinds = d.choice(GRANULARITIES[:3]), d.choice(GRANULARITIES)
    made = F.quantize(d.normal([source if gathers else rows, k], torch.float32), granularity=kinds[0])
    matrices = [F.quantize(d.normal([n, k], torch.float32), granularity=kinds[1]) for _ in range(groups)]
    ends = sorted(d.between(0, rows) for _ in range(groups))
    gather = d.integers([rows], 0, source, torch.int32) if gathers else None
    bias = d.some(d.tensor([groups, n], torch.float32, dense=True))

    def check(output: Tensor, case: Case) -> str | None:
        left = made.codes.double() * spread(made.scales, *made.codes.shape)
        left = left if gather is None else left[gather.long()]
        wanted, begin = torch.zeros(rows, n, dtype=torch.float64), 0
        for group, end in enumerate(ends):
            right = matrices[group].codes.double() * spread(matrices[group].scales, n, k)
            wanted[begin:end] = left[begin:end] @ right.t() + (0 if bias is None else bias[group].double())
            begin = end
        return difference(output, wanted, case, "the product")

    weight, scales = (torch.stack([getattr(one, part) for one in matrices]) for part in ("codes", "scales"))
    options = {"bias": bias, "gather": gather, "dtype": d.choice((torch.float32, torch.bfloat16, torch.float16))}
    args = (made.codes, weight, made.scales, scales, torch.tensor(ends))
    case = Case(args, options, check=check, gradients=False, terms=k)
    if d.maybe(0.1):
        case.options["dtype"], case.refused = torch.int8, "the type is none of a product"
    return case
