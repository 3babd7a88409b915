"""Attention, whole and in parts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch import functional as F

from .case import Case, difference
from .draw import Draw
from .run import generates

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))
from attention_reference import attend  # type: ignore[import-not-found]


def _shapes(d: Draw) -> tuple[int, int, int, int, int, int, int]:
    key_heads = d.size(3, empty=0.0)
    heads = key_heads * d.choice((1, 1, 2, 4))
    size = d.choice((1, 4, 7, 8, 16, 24, 33, 64))
    return d.size(3), heads, key_heads, d.size(40), d.size(40), size, size if d.maybe(0.8) else d.size(30, empty=0.0)


def _options(d: Draw, batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if d.maybe(0.4):
        options["causal"] = True
    if d.maybe(0.3):
        options["causal_offset"] = d.choice((0, 3, -3, keys - queries, 1000, -1000))
    if d.maybe(0.2):
        options["window"] = (d.choice((-1, 0, 1, 5, 100)), d.choice((-1, 0, 1, 5, 100)))
    if d.maybe(0.3):
        options["scale"] = d.choice((0.5, 1.0, 0.0, -0.3))
    if d.maybe(0.2):
        options["alibi_slopes"] = torch.rand(heads, generator=d.generator)
    if d.maybe(0.2):
        sizes = [size if d.maybe() else 1 for size in (batch, heads, queries, keys)]
        if 0 in (queries, keys):
            sizes[2:] = [queries, keys]
        options["bias"] = d.tensor(sizes, dtype)
    if d.maybe(0.2):
        options["softcap"] = d.choice((1.0, 20.0))
        options["softcap_after_bias"] = d.maybe(0.3)
    if d.maybe(0.2):
        options["sinks"] = d.tensor([heads], torch.promote_types(dtype, torch.float32), dense=True)
    if d.maybe(0.2):
        options["mask"] = d.booleans([size if d.maybe() else 1 for size in (batch, heads, queries, keys)])
    if d.maybe(0.15):
        options["query_segment_ids"] = d.integers([batch, queries], -1, 3, torch.int32)
        options["key_segment_ids"] = d.integers([batch, keys], -1, 3, torch.int32)
    return options


def _reference(query: Tensor, key: Tensor, value: Tensor, layout: str = "bhsd", return_lse: bool = False,
               deterministic: Any = None, batch_invariant: bool = False, **options: Any) -> Any:  # fmt: skip
    if layout == "bshd":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"].detach()
    output, lse = attend(query, key, value, **options)
    output = output.transpose(1, 2) if layout == "bshd" else output
    return (output, lse) if return_lse else output


def _in_double(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}


def _spoil(d: Draw, case: Case, heads: int, dtype: torch.dtype) -> Case:
    if not d.maybe(0.12):
        return case
    args, way = list(case.args), d.between(0, 5)
    if way == 0:
        case.options["layout"], case.refused = "sbhd", "the layout is unknown"
    elif way == 1:
        args[1], case.refused = args[1][..., :-1], "query and key have different sizes"
    elif way == 2:
        case.options["softcap"], case.refused = d.choice((0.0, -1.0)), "the cap is not positive"
    elif way == 3:
        case.options["dropout_p"], case.refused = d.wrong_probability(), "the probability is none"
    elif way == 4:
        case.options["sinks"], case.refused = torch.zeros(heads + 1), "sinks have another size"
    else:
        args[2], case.refused = torch.ones(list(args[2].shape), dtype=torch.int32), "the value is of integers"
    case.args = tuple(args)
    return case


@generates("attention")
def attention(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    batch, heads, key_heads, queries, keys, size, value_size = _shapes(d)
    layout = d.choice(("bhsd", "bshd"))

    def tensor(count: int, length: int, width: int) -> Tensor:
        return d.tensor([batch, count, length, width] if layout == "bhsd" else [batch, length, count, width], dtype)

    args = (tensor(heads, queries, size), tensor(key_heads, keys, size), tensor(key_heads, keys, value_size))
    options = _options(d, batch, heads, queries, keys, dtype)
    options |= {"layout": layout, "return_lse": d.maybe(0.3)}
    if d.maybe(0.1):
        options["deterministic"] = True
    # Probabilities and their gradient are rounded to the values' type before the second product.
    case = Case(args, options, _reference, terms=max(keys, queries, size, 1), roundings=8)
    # The gradient of a score sums to 0 over a row, and so does that of a bias for many.
    case.least_top = 4.0 + 0.1 * (size * heads * queries * keys) ** 0.5
    case.constants = ("alibi_slopes",)
    return _spoil(d, case, heads, dtype)


@generates("attention_fp8")
def attention_fp8(d: Draw, name: str) -> Case:
    """Against fp64 on the inputs as they are: what rounding to four bits may cost, and no more."""
    dtype = d.dtype(double=False)
    batch, heads, key_heads, queries, keys, size, value_size = _shapes(d)
    layout = d.choice(("bhsd", "bshd"))
    shapes = ([batch, heads, queries, size], [batch, key_heads, keys, size], [batch, key_heads, keys, value_size])
    args = [d.normal(shape, dtype) for shape in shapes]
    options: dict[str, Any] = {"causal": d.maybe(), "rotate": d.maybe()}
    if d.maybe(0.3):
        options["window"] = (d.between(0, 30), d.choice((-1, 0, 5)))
    exact = {k: v for k, v in options.items() if k != "rotate"}
    expected = attend(*(x.double() for x in args), **exact)[0]
    if layout == "bshd":
        args = [x.transpose(1, 2).contiguous() for x in args]
        expected = expected.transpose(1, 2)

    def check(output: Tensor, case: Case) -> str | None:
        # A score of n columns errs by about 2^-5 of its terms, and multiplies probabilities.
        error = float((output.double() - expected).abs().max()) if output.numel() else 0.0
        return None if error < 0.5 else f"attention_fp8 is off by {error}"

    return Case(tuple(args), options | {"layout": layout}, check=check, gradients=False)


@generates("attention_part_", "attention_part_backward_")
def part(d: Draw, name: str) -> Case:
    dtype = d.choice((torch.float32, torch.bfloat16, torch.float64))
    batch, heads, key_heads, queries, keys, size, value_size = _shapes(d)
    shapes = ([batch, heads, queries, size], [batch, key_heads, keys, size], [batch, key_heads, keys, value_size])
    query, key, value = (d.tensor(shape, dtype) for shape in shapes)
    options = _options(d, batch, heads, queries, keys, dtype)
    for unused in ("sinks", "query_segment_ids", "key_segment_ids", "mask", "bias"):
        options.pop(unused, None)
    options.setdefault("causal_offset", keys - queries)
    cut = d.between(0, keys)
    numbers = torch.promote_types(dtype, torch.float32)
    leaves = [x.double().clone().requires_grad_() for x in (query, key, value)]
    whole, lse = attend(*leaves, **_in_double(options))
    if name == "attention_part_":
        output = torch.full(list(whole.shape), torch.nan, dtype=numbers)
        sums = torch.full(list(lse.shape), -torch.inf, dtype=numbers)
        F.attention_part_(output, sums, query, key[:, :, cut:], value[:, :, cut:], first_key=cut, **options)

        def check(_: Any, case: Case) -> str | None:
            return difference(output, whole, case, "output") or difference(sums, lse, case, "lse")

        args = (output, sums, query, key[:, :, :cut], value[:, :, :cut])
        case = Case(args, options, check=check, gradients=False, terms=max(keys, size), roundings=8, least_top=4.0)
        if dtype is torch.bfloat16:
            case.roundings = 2000  # products of bf16 into fp32
        return _spoil_part(d, case)
    grad = d.tensor(list(whole.shape), dtype)
    wanted = torch.autograd.grad(whole, leaves, grad.double())
    grads = [torch.zeros(list(x.shape), dtype=numbers) for x in (query, key, value)]

    def check_grads(_: Any, case: Case) -> str | None:
        F.attention_part_backward_(
            grads[0], grads[1][:, :, cut:], grads[2][:, :, cut:], grad, query, key[:, :, cut:], value[:, :, cut:],
            stored, sums, first_key=cut, **options,
        )  # fmt: skip
        found = [difference(one, two, case, f"gradient {i}") for i, (one, two) in enumerate(zip(grads, wanted))]
        return next((text for text in found if text), None)

    stored, sums = whole.detach().to(dtype), lse.detach().to(numbers)
    args = (grads[0], grads[1][:, :, :cut], grads[2][:, :, :cut], grad, query, key[:, :, :cut], value[:, :, :cut],
            stored, sums)  # fmt: skip
    case = Case(
        args, options, check=check_grads, gradients=False, terms=max(keys, queries, size), roundings=16, least_top=4.0
    )
    if dtype is torch.bfloat16:
        case.roundings = 8000
    return _spoil_part(d, case)


def _spoil_part(d: Draw, case: Case) -> Case:
    case.names = ("attention",)
    if d.maybe(0.1):
        args = list(case.args)
        place = 1 if len(args) == 5 else 8
        args[place] = args[place].double() if args[place].dtype is torch.float32 else args[place].float()
        case.args, case.refused = tuple(args), "lse is of another type"
    return case
