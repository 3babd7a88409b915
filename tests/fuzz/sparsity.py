"""2:4 sparsity: what is kept of a matrix, and products with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case
from .draw import Draw
from .elementwise import FUNCTIONS
from .run import generates


def _weight(d: Draw) -> Tensor:
    # Not large: then an activation's gradient amplifies the rounding of what it is taken of, ours and torch's alike.
    return d.tensor([d.size(60), 4 * d.size(80)], d.dtype(double=False), scale=d.choice((1.0, 1e-3)))


@generates("sparse_compress")
def sparse_compress(d: Draw, name: str) -> Case:
    weight = _weight(d)
    case = Case((weight,), {}, check=lambda made, case: _check(made, weight), gradients=False)
    if d.maybe(0.1):
        case.args, case.refused = ((weight.double(),), "fp64") if d.maybe(0.5) else ((weight[None],), "a batch")
    return case


def _check(made: Any, weight: Tensor) -> str | None:
    dense, mask = made.to_dense(), made.mask()
    if dense.shape != weight.shape or not torch.equal(dense, torch.where(mask, weight, 0)):
        return "a kept value is not the weight's"
    if not weight.numel():
        return None
    groups, kept = weight.abs().float().view(weight.shape[0], -1, 4), mask.view(weight.shape[0], -1, 4)
    if not bool((kept.sum(-1) == 2).all()):
        return "not two of four are kept"
    least = groups.masked_fill(~kept, torch.inf).amin(-1)
    most = groups.masked_fill(kept, -1.0).amax(-1)
    return None if bool((least >= most).all()) else "a larger value was left out"


@generates("sparse_matmul")
def sparse_matmul(d: Draw, name: str) -> Case:
    weight = _weight(d)
    sparse = F.sparse_compress(weight)
    rows, columns = weight.shape
    x = d.tensor([*d.choice(([], [3], [2, 5], [70])), columns], weight.dtype)
    told: dict[str, Any] = {"activation": d.some(d.choice(("gelu", "silu", "relu")))}
    bias = d.some(d.tensor([rows], weight.dtype))
    if bias is not None:
        told["bias"] = bias
    values = sparse.to_dense().double()

    def reference(x: Tensor, sparse: Any, activation: str | None = None, bias: Tensor | None = None) -> Tensor:
        v = x @ values.t()
        v = v if bias is None else v + bias
        return v if activation is None else FUNCTIONS[activation](v)

    top = float(values.abs().max()) if values.numel() else 0.0
    case = Case((x, sparse), told, reference=reference, terms=max(1, columns), roundings=3, least_top=top)
    if columns and d.maybe(0.05):
        case.args, case.refused = (x[..., :-1], sparse), "x has another number of columns"
    return case
