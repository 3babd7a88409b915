"""Activations, gated activations, dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as T
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case
from .draw import Draw
from .run import generates

FUNCTIONS = {
    "gelu": lambda x: x * torch.special.erfc(-x * 0.5**0.5) / 2,  # torch's own cancels far below 0
    "gelu_tanh": lambda x: T.gelu(x, approximate="tanh"),
    "silu": T.silu,
    "relu": T.relu,
    "relu_squared": lambda x: T.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


def kept(shape: Any, p: float, seed: Tensor | None) -> Any:
    """What dropout multiplies by, as our op draws it; its share is checked by `dropout`'s own generator."""
    if not p or not shape:
        return 1.0
    return F.dropout(torch.ones(tuple(shape), dtype=torch.float64), p, seed=seed)


def finished(values: Tensor, residual: Tensor | None, p: float, seed: Tensor | None) -> Tensor:
    values = values * kept(values.shape, p, seed)
    return values if residual is None else values + residual


def _activation(
    x: Tensor, kind: str, bias: Any = None, residual: Any = None, dropout_p: float = 0.0, seed: Any = None
) -> Tensor:
    return finished(FUNCTIONS[kind](x if bias is None else x + bias), residual, dropout_p, seed)


def parameter(d: Draw, columns: int, dtype: torch.dtype) -> Tensor:
    """Of x's type, or fp32, or narrower: what the ops document."""
    types = [dtype, torch.float32 if dtype is not torch.float64 else dtype]
    return d.tensor([columns], d.choice(types))


@generates("activation")
def activation(d: Draw, name: str) -> Case:
    shape, dtype = d.shape(1, 4), d.dtype()
    options = {
        "bias": d.some(parameter(d, shape[-1], dtype)),
        "residual": d.some(d.tensor(shape, dtype)),
        "dropout_p": d.probability(),
        "seed": d.seed(),
    }
    case = Case((d.tensor(shape, dtype, scale=d.magnitude()), d.choice(list(FUNCTIONS))), options, _activation)
    case.least_top = 1.0
    return spoil_common(d, case, shape, dtype)


def spoil_common(d: Draw, case: Case, shape: list[int], dtype: torch.dtype) -> Case:
    """One argument in eight calls is wrong."""
    if not d.maybe(0.12):
        return case
    way = d.between(0, 4)
    if way == 0:
        case.args = tuple("spline" if isinstance(value, str) else value for value in case.args)
        case.refused = "the function is unknown"
    elif way == 1:
        case.options["dropout_p"] = d.wrong_probability()
        case.refused = "the probability is none"
    elif way == 2:
        case.options["residual"] = d.tensor(d.wrong_size(shape), dtype)
        case.refused = "the residual has another shape"
    elif way == 3:
        case.args = tuple(v.to(torch.int32) if isinstance(v, Tensor) else v for v in case.args)
        case.options["residual"] = None
        case.refused = "x is of integers"
    else:
        case.options.update(dropout_p=0.5, seed=torch.tensor([1]))
        case.refused = "the seed has one element"
    return case


@generates("gelu", "silu", "relu", "relu_squared")
def plain(d: Draw, name: str) -> Case:
    x = d.tensor(d.shape(0, 4), d.dtype(), scale=d.magnitude())
    case = Case((x,), {}, lambda x: FUNCTIONS[name](x), names=("activation",), least_top=1.0)
    if name == "gelu" and d.maybe():
        case.options["approximate"] = d.choice(("none", "tanh"))
        case.reference = lambda x, approximate: FUNCTIONS["gelu_tanh" if approximate == "tanh" else "gelu"](x)
        if d.maybe(0.1):
            case.options["approximate"], case.refused = "erf", "the formula is unknown"
            return case
    if d.maybe(0.08):
        case.args, case.refused = (x.to(torch.int64),), "x is of integers"
    return case


def _gated(gate: Tensor, up: Tensor, kind: str, gate_bias: Any = None, up_bias: Any = None, **rest: Any) -> Tensor:
    gate = gate if gate_bias is None else gate + gate_bias
    up = up if up_bias is None else up + up_bias
    return finished(FUNCTIONS[kind](gate) * up, rest.get("residual"), rest.get("dropout_p", 0.0), rest.get("seed"))


@generates("gated_activation")
def gated_activation(d: Draw, name: str) -> Case:
    shape, dtype = d.shape(1, 4), d.dtype()
    options = {
        "gate_bias": d.some(parameter(d, shape[-1], dtype)),
        "up_bias": d.some(parameter(d, shape[-1], dtype)),
        "residual": d.some(d.tensor(shape, dtype)),
        "dropout_p": d.probability(),
        "seed": d.seed(),
    }
    case = Case(
        (d.tensor(shape, dtype), d.tensor(shape, dtype), d.choice(GATES)), options, _gated, roundings=2, least_top=1.0
    )
    if d.maybe(0.04):
        case.args = (case.args[0], d.tensor(d.wrong_size(shape), dtype), case.args[2])
        case.refused = "gate and up have different shapes"
        return case
    return spoil_common(d, case, shape, dtype)


def _packed(x: Tensor, kind: str, bias: Any = None, **rest: Any) -> Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return finished(FUNCTIONS[kind](gate) * up, rest.get("residual"), rest.get("dropout_p", 0.0), rest.get("seed"))


@generates("gated_activation_packed")
def gated_activation_packed(d: Draw, name: str) -> Case:
    shape, dtype = d.shape(1, 4), d.dtype()
    wide = [*shape[:-1], 2 * shape[-1]]
    options = {
        "bias": d.some(parameter(d, wide[-1], dtype)),
        "residual": d.some(d.tensor(shape, dtype)),
        "dropout_p": d.probability(),
        "seed": d.seed(),
    }
    case = Case(
        (d.tensor(wide, dtype), d.choice(GATES)),
        options,
        _packed,
        roundings=2,
        names=("gated_activation",),
        least_top=1.0,
    )
    if d.maybe(0.04):
        case.args = (d.tensor([*shape[:-1], wide[-1] + 1], dtype), case.args[1])
        case.refused = "x has an odd number of columns"
        return case
    return spoil_common(d, case, shape, dtype)


KIND_OF = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}


@generates("swiglu", "geglu", "reglu", "swiglu_packed", "geglu_packed", "reglu_packed")
def gated_by_name(d: Draw, name: str) -> Case:
    shape, dtype = d.shape(1, 4), d.dtype()
    kind = KIND_OF[name.removesuffix("_packed")]
    options = {"approximate": d.choice(("none", "tanh"))} if kind == "gelu" and d.maybe() else {}

    def reference(*tensors: Tensor, approximate: str = "none") -> Tensor:
        gate, up = tensors if len(tensors) == 2 else tensors[0].chunk(2, -1)
        return FUNCTIONS[kind + ("_tanh" if approximate == "tanh" else "")](gate) * up

    if name.endswith("_packed"):
        args: tuple[Any, ...] = (d.tensor([*shape[:-1], 2 * shape[-1]], dtype),)
    else:
        args = (d.tensor(shape, dtype), d.tensor(shape, dtype))
    names = ("gated_activation", "geglu")
    case = Case(args, options, reference, roundings=2, names=names, least_top=1.0)
    if options and d.maybe(0.1):
        case.options["approximate"], case.refused = "erf", "the formula is unknown"
    elif d.maybe(0.06):
        wrong = [*shape[:-1], 2 * shape[-1] + 1] if len(args) == 1 else d.wrong_size(shape)
        case.args, case.refused = (*args[:-1], d.tensor(wrong, dtype)), "the columns do not pair up"
    return case


@generates("dropout")
def dropout(d: Draw, name: str) -> Case:
    shape, dtype, p = d.shape(0, 4), d.dtype(), d.choice((0.0, 0.1, 0.5, 0.9, 1.0, 1e-7, 1 - 1e-7))
    x = d.tensor(shape, dtype)
    case = Case((x, p), {"seed": d.some(d.seed()), "training": d.maybe(0.8)}, check=_check_dropout, gradients=False)
    if d.maybe(0.1):
        case.args, case.refused = (x, d.wrong_probability()), "the probability is none"
        if not case.options["training"]:
            case.refused = None
    return case


def _check_dropout(output: Tensor, case: Case) -> str | None:
    x, p = case.args
    if not case.options["training"]:
        return None if output is x or torch.equal(output, x) else "changed outside training"
    steps = round(p * 65536) / 65536
    if steps == 1.0:
        return None if not output.any() else "p = 1 keeps something"
    wanted = x.double() / (1 - steps)
    near = (output.double() - wanted).abs() <= 2.0**-7 * wanted.abs() + 1e-12
    if not bool((near | (output == 0)).all()):
        return "an element is neither 0 nor x / (1 - p)"
    counted = x != 0
    n = int(counted.sum())
    # A stride of 0 repeats values, not draws: every element has its own.
    share = float((output != 0)[counted].double().mean()) if n else 1 - steps
    if n and abs(share - (1 - steps)) > 6 * (max(steps * (1 - steps), 1e-5) / n) ** 0.5 + 1e-3:
        return f"{share} of {n} elements are kept, p is {p}"
    return None


@generates("interleave_gate_up")
def interleave(d: Draw, name: str) -> Case:
    shape, dtype = d.shape(1, 2), d.dtype()
    gate, up = d.tensor(shape, dtype), d.tensor(shape, dtype)
    case = Case((gate, up), {}, lambda gate, up: torch.stack([gate, up], 1).flatten(0, 1))
    if d.maybe(0.1):
        case.args, case.refused = (gate, d.tensor(d.wrong_size(shape), dtype)), "the halves have different shapes"
    return case
