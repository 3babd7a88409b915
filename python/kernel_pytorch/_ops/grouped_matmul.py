"""grouped_matmul: products of groups of rows, each with a matrix of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activation import activation as activate
from .gated_activation import gated_activation
from .support.autograd import wants_gradient
from .support.casting import autocast
from .support.declare import differentiable, without_gradient

_ops = torch.ops.kernel_pytorch
_GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "glu": "sigmoid"}
_KINDS = ("gelu", "gelu_tanh", "silu", "relu", "relu_squared", "sigmoid", "tanh")
_CLAMPED = "swiglu_clamped"
_INTERLEAVED = "_interleaved"


class Activation(NamedTuple):
    """What the ops call an activation: "plain", "gated" (columns in turns) or "packed_gated" (gates first)."""

    form: str
    kind: str
    limit: float
    slope: float


def activation_of(op: str, name: str | None, limit: float = 7.0, slope: float = 1.702) -> Activation:
    """The activation of this name; gates may end in "_interleaved": columns are gate, up, gate, up."""
    if name is None:
        return Activation("plain", "identity", 0.0, slope)
    if name in _KINDS:
        return Activation("plain", name, 0.0, slope)
    gate = name.removesuffix(_INTERLEAVED)
    form = "packed_gated" if gate == name else "gated"
    if gate == _CLAMPED:
        if limit <= 0:
            raise ValueError(f"{op}: limit is {limit}; it must be positive")
        return Activation(form, "silu", limit, slope)
    if gate in _GATES:
        return Activation(form, _GATES[gate], 0.0, slope)
    known = ", ".join((*_KINDS, *_GATES, _CLAMPED))
    raise ValueError(f'{op}: activation is "{name}"; it is one of {known}, gates also with {_INTERLEAVED}')


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    gather: Tensor | None = None,
    transpose_weight: bool = False,
    limit: float = 7.0,
    slope: float = 1.702,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Row r of x times the matrix of r's group; offsets stay on the device, nothing is padded.

    Args:
        x: [rows, k], or with gather [any, k]. fp32, bf16, fp16 and fp64.
        weight: [groups, k, n], or with transpose_weight [groups, n, k]; views are not copied. Up to 1024 groups.
        offsets: [groups], where each group ends, or [groups + 1] with a 0 in front. Ascending; groups may be empty.
            Those that leave the rows raise on the CPU, and with KERNEL_PYTORCH_CHECK=1 on a GPU, where they are
            clamped otherwise.
        bias: [groups, n].
        activation: None, an activation (gelu, silu, relu, ...) or a gate: swiglu, geglu, reglu, glu take the first half
            of the columns as gates, swiglu_interleaved and so on take gate, up, gate, up. swiglu_clamped is gpt-oss'.
        gather: [rows], int32: row r is x[gather[r]].
        transpose_weight: whether the weight is stored as linear layers store theirs.
        limit, slope: of swiglu_clamped: g * sigmoid(slope * g) * (u + 1), g at most limit and u within it.
        out_dtype: fp32, where x is narrower.

    Returns:
        [rows, n], with a gate [rows, n / 2]; zeros for rows behind the last group.
    """
    x, weight = autocast(x, weight)
    if weight.dim() != 3:
        raise ValueError(f"grouped_matmul: weight has shape {list(weight.shape)}; it must be [groups, k, n]")
    matrices = weight.mT if transpose_weight else weight
    ends = ends_of(offsets, matrices.shape[0])
    gather = None if gather is None else gather.int()
    rows = x.shape[0] if gather is None else gather.shape[0]
    chosen = activation_of("grouped_matmul", activation, limit, slope)
    if activation is not None and wants_gradient(x, weight, bias):
        plain = activation_of("grouped_matmul", None)
        return apply_activation(_grouped(x, matrices, ends, gather, bias, *plain, rows, out_dtype), chosen)
    return _grouped(x, matrices, ends, gather, bias, *chosen, rows, out_dtype)  # type: ignore[no-any-return]


def ends_of(offsets: Tensor, groups: int) -> Tensor:
    """Where groups end, int32, of offsets with or without the 0 in front."""
    return (offsets[1:] if offsets.dim() == 1 and offsets.shape[0] == groups + 1 else offsets).int()


def apply_activation(v: Tensor, chosen: Activation) -> Tensor:
    """The activation as an op of its own, which has a gradient."""
    if chosen.form == "plain":
        return v if chosen.kind == "identity" else activate(v, chosen.kind)
    gate, up = (v[..., ::2], v[..., 1::2]) if chosen.form == "gated" else v.chunk(2, -1)
    if not chosen.limit:
        return gated_activation(gate, up, chosen.kind)
    gate, up = gate.clamp(max=chosen.limit), up.clamp(-chosen.limit, chosen.limit)
    return gate * torch.sigmoid(chosen.slope * gate) * (up + 1)


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    x, matrices, offsets, gather, bias = saved
    grad = grads[0].to(x.dtype)
    of_x = of_matrices = of_bias = None
    if wanted[0]:
        plain = activation_of("grouped_matmul", None)
        of_x = _ops.grouped_matmul(grad, matrices.mT, offsets, None, None, *plain, grad.shape[0], None)
        if gather is not None:  # rows in no group are zeros, whatever their index is
            of_x = _ops.embedding_backward(of_x, gather.clamp(min=0).long(), x.shape[0], -1)
    if wanted[1]:
        if matrices.stride(-1) == 1:
            of_matrices = _weight(x, grad, offsets, gather, None, None)
        else:
            of_matrices = _weight(grad, x, offsets, None, gather, None).mT
    if wanted[4]:
        of_bias = group_sums(grad, offsets, None, None, bias.dtype)
    return of_x, of_matrices, None, None, of_bias


_grouped = differentiable(
    "grouped_matmul",
    gradient=_gradient,
    saves=["a", "b", "offsets", "gather", "bias"],
    instead="a loop of torch.matmul over the groups",
)
_weight = without_gradient("grouped_matmul_weight")
group_sums = without_gradient("group_sums")
