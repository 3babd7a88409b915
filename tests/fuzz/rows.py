"""Norms, softmaxes, means and tables: ops on rows."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .draw import Draw
from .elementwise import parameter
from .run import generates


def _rms(x: Tensor, weight: Any, eps: float, weight_offset: float) -> Tensor:
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return normed if weight is None else normed * (weight + weight_offset)


def _rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum as it is stored and normalised; its gradient passes."""
    return total + (total.detach().to(dtype).double() - total.detach())


def _rms_norm(dtype: torch.dtype, x: Tensor, weight: Any = None, eps: float = 1e-6, residual: Any = None,
              weight_offset: float = 0.0, out_dtype: Any = None) -> Any:  # fmt: skip
    total = x if residual is None else _rounded(x + residual, dtype)
    output = _rms(total, weight, eps, weight_offset)
    return output if residual is None else (output, total)


def _layer_norm(dtype: torch.dtype, x: Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5,
                residual: Any = None, out_dtype: Any = None) -> Any:  # fmt: skip
    total = x if residual is None else _rounded(x + residual, dtype)
    centred = total - total.mean(-1, keepdim=True)
    output = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    output = output if weight is None else output * weight
    output = output if bias is None else output + bias
    return output if residual is None else (output, total)


@generates("rms_norm", "add_rms_norm", "layer_norm")
def norm(d: Draw, name: str) -> Case:
    shape, dtype = d.shape(1, 4), d.dtype()
    x = d.tensor(shape, dtype, scale=d.choice((1.0, 1.0, 10.0)))
    weight = d.some(parameter(d, shape[-1], dtype), 0.7)
    options: dict[str, Any] = {"eps": d.choice((1e-6, 1e-5, 1e-3))}
    if name == "layer_norm":
        options["bias"] = d.some(parameter(d, shape[-1], dtype))
    else:
        options["weight_offset"] = d.choice((0.0, 1.0))
    if dtype is torch.float32 and d.maybe(0.2):
        options["out_dtype"] = d.choice((torch.bfloat16, torch.float16))
    residual = d.tensor(shape, dtype)
    args: tuple[Any, ...] = (x, weight)
    reference: Any = functools.partial(_layer_norm if name == "layer_norm" else _rms_norm, dtype)
    if name == "add_rms_norm":
        args = (x, residual, weight)
        reference = lambda x, residual, weight, **rest: _rms_norm(dtype, x, weight, residual=residual, **rest)  # noqa: E731
    elif d.maybe(0.4):
        options["residual"] = residual
    # The sum is rounded to its type before it is normalised, and a gradient of rows is made through a product.
    case = Case(
        args, options, reference, terms=_count(shape), roundings=4, names=("rms_norm", "layer_norm"), least_top=4.0
    )
    return _spoil_norm(d, case, shape, dtype)


def _count(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= max(size, 1)
    return total


def _spoil_norm(d: Draw, case: Case, shape: list[int], dtype: torch.dtype) -> Case:
    if not d.maybe(0.12):
        return case
    way = d.between(0, 3)
    args = list(case.args)
    if way == 0:
        args[-1], case.refused = d.tensor([shape[-1] + 1], dtype), "the weight has another size"
    elif way == 1:
        args[0], case.refused = torch.ones(shape, dtype=torch.int64), "x is of integers"
        if len(args) == 3 or "residual" in case.options:
            case.refused = None  # promoted to the residual's type
            case.reference = None
    elif way == 2 and len(args) == 3:
        args[1], case.refused = d.tensor(d.wrong_size(shape), dtype), "the residual has another shape"
    elif way == 2:
        case.options["residual"] = d.tensor(d.wrong_size(shape), dtype)
        case.refused = "the residual has another shape"
    else:
        case.options["eps"], case.refused = d.choice((-1.0, float("nan"))), "eps is no small positive number"
    case.args = tuple(args)
    return case


def _scores(x: Tensor, scale: float, mask: Any, causal: bool) -> tuple[Tensor, Tensor]:
    scores = x * scale
    kept = torch.ones(x.shape, dtype=torch.bool)
    if mask is not None and mask.dtype is torch.bool:
        kept = kept & mask
    elif mask is not None:
        scores = scores + mask
    if causal:
        queries, keys = x.shape[-2:] if x.dim() > 1 else (1, x.shape[-1])
        places = torch.arange(keys)[None] <= torch.arange(queries)[:, None] + keys - queries
        kept = kept & places.reshape(x.shape[-2:] if x.dim() > 1 else (keys,))
    return scores, kept & (scores > -torch.inf)


def softmax_reference(x: Tensor, scale: float = 1.0, mask: Any = None, causal: bool = False) -> Tensor:
    scores, kept = _scores(x, scale, mask, causal)
    alive = kept.any(-1, keepdim=True) if x.shape[-1] else kept
    safe = scores.masked_fill(~kept & alive, -torch.inf).masked_fill(~alive, 0.0) if x.shape[-1] else scores
    return torch.softmax(safe, -1).masked_fill(~alive, 0.0) if x.shape[-1] else safe


def log_softmax_reference(x: Tensor, scale: float = 1.0, mask: Any = None, causal: bool = False) -> Tensor:
    scores, kept = _scores(x, scale, mask, causal)
    if not x.shape[-1]:
        return scores
    alive = kept.any(-1, keepdim=True)
    safe = scores.masked_fill(~kept & alive, -torch.inf).masked_fill(~alive, 0.0)
    return torch.log_softmax(safe, -1).masked_fill(~alive, -torch.inf)


@generates("softmax", "log_softmax", "softmax_", "log_softmax_")
def softmax(d: Draw, name: str) -> Case:
    in_place = name.endswith("_")
    shape, dtype = d.shape(1, 4), d.dtype()
    x = d.tensor(shape, dtype, dense=in_place, scale=d.choice((1.0, 1.0, 30.0)))
    options: dict[str, Any] = {
        "scale": d.choice((1.0, 0.125, 2.5, 0.0, -1.0)),
        "causal": len(shape) > 1 and d.maybe(0.3),
    }
    if d.maybe(0.4):
        sizes = [size if d.maybe(0.6) else 1 for size in shape][d.between(0, len(shape) - 1) :]
        types = (dtype, torch.float32 if dtype is not torch.float64 else dtype)
        options["mask"] = d.booleans(sizes) if d.maybe(0.6) else d.tensor(sizes, d.choice(types))
    reference = softmax_reference if "log" not in name else log_softmax_reference
    case = Case((x,), options, reference, terms=_count(shape), roundings=3, gradients=not in_place, names=("softmax",))
    # A gradient of scores sums to 0 over a row; a mask's sums rows of what was rounded.
    case.least_top = 8.0 * max(1.0, _count(shape) ** 0.5) if dtype in (torch.bfloat16, torch.float16) else 10.0
    if d.maybe(0.1):
        way = d.between(0, 2)
        if way == 0:
            case.args, case.refused = (x.to(torch.int32),), "x is of integers"
        elif way == 1:
            case.options["mask"] = d.booleans(d.wrong_size(shape))
            case.refused = "the mask does not broadcast"
        else:
            case.options["scale"], case.refused = float("nan"), None
            case.reference = None
    return case


@generates("mean_pool")
def mean_pool(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    is_packed = d.maybe()
    shape = d.shape(2 if is_packed else 3, 4)
    if not is_packed:
        case = Case((d.tensor(shape, dtype),), {}, _mean_of_batch, terms=_count(shape))
    else:
        tokens = shape[0]
        ends = sorted(d.between(0, tokens) for _ in range(d.between(1, 5)))
        offsets = torch.tensor(ends, dtype=d.choice((torch.int32, torch.int64)))
        case = Case((d.tensor(shape, dtype), offsets), {}, _mean_of_pack, terms=_count(shape))
        if d.maybe(0.15):
            wrong = d.choice(([0, tokens + 1], [-1, tokens], [2**33, 2**33 + 1], [tokens, 0] if tokens else [1, 0]))
            case.args, case.refused = (case.args[0], torch.tensor(wrong)), "the ends leave the tokens"
            if 0 in shape[1:]:
                case.refused = case.reference = None  # of no columns nothing is read
            return case
    case.names = ("mean_pool",)
    if d.maybe(0.06):
        case.args, case.refused = (torch.ones(shape, dtype=torch.int32), *case.args[1:]), "x is of integers"
    return case


def _mean_of_batch(x: Tensor) -> Tensor:
    return x.sum(1) / max(x.shape[1], 1)


def _mean_of_pack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    ends = cu_seqlens.tolist()
    parts = [x[a:b].sum(0) / max(b - a, 1) for a, b in itertools.pairwise(ends)]
    return torch.stack(parts) if parts else x.new_zeros((0, *x.shape[1:]))


@generates("chunk_mean_pool")
def chunk_mean_pool(d: Draw, name: str) -> Case:
    shape, dtype = d.shape(3, 4), d.dtype()
    size = d.choice((1, 2, 3, 7, 16, shape[1] or 1, 1000, 2**40))
    case = Case((d.tensor(shape, dtype), size), {}, _means_of_chunks, terms=_count(shape), names=("mean_pool",))
    if d.maybe(0.1):
        case.args, case.refused = (case.args[0], d.choice((0, -1, -(2**40)))), "a chunk holds at least one token"
    return case


def _means_of_chunks(x: Tensor, chunk_size: int) -> Tensor:
    parts = [x[:, i : i + chunk_size].mean(1) for i in range(0, x.shape[1], chunk_size)]
    return torch.stack(parts, 1) if parts else x.new_zeros((x.shape[0], 0, *x.shape[2:]))


@generates("embedding")
def embedding(d: Draw, name: str) -> Case:
    rows, columns, dtype = d.size(100, empty=0.01), d.size(100), d.dtype()
    shape = d.shape(0, 3, 500) if rows else [0]
    indices = d.integers(shape, 0, rows, d.choice((torch.int32, torch.int64)))
    padding = d.choice((None, None, 0, rows - 1, -1, -rows)) if rows else None
    weight = d.tensor([rows, columns], dtype)

    def reference(input: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        if padding_idx is not None and padding_idx < 0:
            padding_idx += rows
        return torch.nn.functional.embedding(input.long(), weight, padding_idx)

    case = Case((indices, weight, padding), {}, reference, terms=max(indices.numel(), 1), roundings=2)
    if d.maybe(0.15):
        way = d.between(0, 2)
        if way == 0 and indices.numel():
            bad = indices.contiguous().clone()
            bad.view(-1)[d.between(0, bad.numel() - 1)] = d.choice((rows, -1, rows + 7))
            case.args, case.refused = (bad, weight, padding), "an index is outside the table" if columns else None
            case.reference = case.reference if columns else None
        elif way == 1:
            case.args, case.refused = (indices.float(), weight, padding), "indices are no integers"
        elif rows:
            case.args, case.refused = (indices, weight, rows + 1), "the padding is outside the table"
    return case
