"""Matrix products and layers of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .case import Case
from .draw import Draw
from .elementwise import FUNCTIONS, parameter
from .run import generates

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "glu": "sigmoid"}
ACTIVATIONS = [kind for kind in FUNCTIONS if kind != "identity"]


@generates("matmul")
def matmul(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    batch = d.shape(0, 2, 12)
    m, n, k = d.size(80), d.size(80), d.size(150)
    a_batch = [size if d.maybe(0.8) else 1 for size in batch][d.between(0, 1) if len(batch) == 2 else 0 :]
    a = d.tensor([k] if d.maybe(0.1) else [*a_batch, m, k], dtype)
    b = d.tensor([k] if d.maybe(0.1) else [*batch, k, n], dtype)
    precision = d.choice(("full", "full", "bf16", "bf16x3")) if dtype is torch.float32 else "full"

    def reference(a: Tensor, b: Tensor, precision: str) -> Tensor:
        if (
            precision == "bf16"
        ):  # the gradient passes the rounding, as the op's products do not: only values are compared
            a, b = (x + (x.detach().float().bfloat16().double() - x.detach()) for x in (a, b))
        return torch.matmul(a, b)

    case = Case((a, b), {"precision": precision}, reference, terms=max(k, m, n), gradients=precision == "full")
    case.roundings = 8.0 if precision == "bf16x3" else 2.0 if a.numel() != b.numel() else 1.0
    if (a.dim() > 2 and b.dim() > 2) or len(batch):
        case.roundings *= 2  # gradients of broadcast operands are summed over the batch
    if d.maybe(0.1):
        way = d.between(0, 2)
        if way == 0:
            case.options["precision"], case.refused = "fp4", "the precision is unknown"
        elif way == 1:
            case.args, case.refused = (d.tensor([m, k + 1], dtype), d.tensor([k + 3, n], dtype)), "k differs"
        else:
            case.args, case.refused = (torch.ones(m, k, dtype=torch.int32), b.to(torch.int32)), "a is of integers"
    return case


def linear_reference(
    x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, residual: Any = None, precision: Any = None
) -> Tensor:
    sums = x @ weight.transpose(0, 1)
    sums = sums if bias is None else sums + bias
    if activation in GATED:
        output = FUNCTIONS[GATED[activation]](sums[..., 0::2]) * sums[..., 1::2]
    else:
        output = FUNCTIONS[activation or "identity"](sums)
    return output if residual is None else output + residual


@generates("linear")
def linear(d: Draw, name: str) -> Case:
    dtype, features, outputs = d.dtype(), d.size(150), d.size(80)
    kind = d.choice((None, "identity", *ACTIVATIONS, *GATED))
    if kind in GATED:
        outputs *= 2
    lead = d.shape(0, 3, 150)
    shape = [*lead, outputs // 2 if kind in GATED else outputs]
    options = {
        "bias": d.some(parameter(d, outputs, dtype)),
        "activation": kind,
        "residual": d.some(d.tensor(shape, dtype), 0.4),
        "precision": "full",
    }
    # Backward multiplies what the activation's gradient was rounded to.
    case = Case(
        (d.tensor([*lead, features], dtype), d.tensor([outputs, features], dtype, scale=0.3)), options,
        linear_reference, terms=max(features, outputs, _rows(lead)), roundings=4, names=("matmul",),
    )  # fmt: skip
    case.least_top = 1.0 + 0.3 * _rows(lead) ** 0.5  # a bias' gradient sums what was rounded, and may cancel
    return _spoil_layer(d, case, shape, dtype)


def _rows(lead: list[int]) -> int:
    rows = 1
    for size in lead:
        rows *= max(size, 1)
    return rows


def _spoil_layer(d: Draw, case: Case, shape: list[int], dtype: torch.dtype) -> Case:
    if not d.maybe(0.12):
        return case
    way = d.between(0, 3)
    args = list(case.args)
    if way == 0:
        case.options["activation"], case.refused = "spline", "the activation is unknown"
    elif way == 1:
        args[1] = d.tensor([args[1].shape[0], args[1].shape[1] + 1], dtype)
        case.refused = "the weight has another size"
    elif way == 2:
        case.options["residual"] = d.tensor(d.wrong_size(shape), dtype)
        case.refused = "the residual has another shape"
    else:
        args[0], case.refused = torch.ones(list(args[0].shape), dtype=torch.int64), "x is of integers"
    case.args = tuple(args)
    return case


@generates("mlp")
def mlp(d: Draw, name: str) -> Case:
    dtype, features, hidden, outputs = d.dtype(), d.size(60), d.size(80), d.size(60)
    lead = d.shape(0, 3, 100)
    kind = d.choice((*ACTIVATIONS, "identity"))
    args = (d.tensor([*lead, features], dtype), d.tensor([hidden, features], dtype, scale=0.3),
            d.tensor([outputs, hidden], dtype, scale=0.3))  # fmt: skip
    options = {
        "bias_in": d.some(parameter(d, hidden, dtype)),
        "bias_out": d.some(parameter(d, outputs, dtype)),
        "activation": kind,
        "residual": d.some(d.tensor([*lead, outputs], dtype), 0.4),
        "precision": "full",
    }

    def reference(x: Tensor, weight_in: Tensor, weight_out: Tensor, bias_in: Any, bias_out: Any, activation: str,
                  residual: Any, precision: Any) -> Tensor:  # fmt: skip
        inner = linear_reference(x, weight_in, bias_in, activation)
        return linear_reference(inner, weight_out, bias_out, None, residual)

    # The hidden rows and their gradient are rounded to x's type on the way.
    case = Case(
        args, options, reference, terms=max(features, hidden, _rows(lead)), roundings=12, names=("linear", "matmul")
    )
    return _spoil_layer(d, case, [*lead, outputs], dtype)
