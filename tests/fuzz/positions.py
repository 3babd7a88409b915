"""Rotary embeddings and their tables."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .case import Case, difference
from .draw import Draw
from .run import generates


def turned(x: Any, cos: Tensor, sin: Tensor, rotary: int, interleaved: bool, inverse: bool = False) -> Any:
    """x [..., sequence, heads, size]; cos and sin [..., sequence, rotary / 2]."""
    if x is None:
        return None
    cos, sin = cos[..., None, :], (-sin if inverse else sin)[..., None, :]
    part, rest = x[..., :rotary], x[..., rotary:]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    one, two = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack([one, two], -1).flatten(-2) if interleaved else torch.cat([one, two], -1)
    return torch.cat([joined, rest], -1)


def _rope(query: Tensor, key: Any, cos: Tensor, sin: Tensor, interleaved: bool, positions: Any, heads_first: bool,
          rotary_dim: Any, inverse: bool = False) -> Any:  # fmt: skip
    if heads_first:
        query, key = query.transpose(-3, -2), key if key is None else key.transpose(-3, -2)
    sequence = query.shape[-3]
    places = torch.arange(sequence) if positions is None else positions.long()
    cos, sin = cos.detach()[places], sin.detach()[places]
    results = [turned(x, cos, sin, rotary_dim, interleaved, inverse) for x in (query, key)]
    if heads_first:
        results = [x if x is None else x.transpose(-3, -2) for x in results]
    return [x for x in results if x is not None]


@generates("rope", "rope_", "rope_from_frequencies")
def rope(d: Draw, name: str) -> Case:
    in_place = name == "rope_"
    dtype, batch, sequence = d.dtype(), d.size(4), d.size(40)
    size = 2 * d.size(40, empty=0.0)
    rotary = 2 * d.between(1, size // 2)
    heads_first, has_batch = d.maybe(0.4), d.maybe(0.8)

    def heads(count: int) -> Tensor:
        shape = [count, sequence, size] if heads_first else [sequence, count, size]
        return d.tensor([batch, *shape] if has_batch else shape, dtype, dense=in_place)

    query, key = heads(d.size(6)), d.some(heads(d.size(6)), 0.7)
    rows = sequence + d.between(0, 9)
    positions = None
    if d.maybe(0.5) and rows:
        shape = [batch, sequence] if has_batch and d.maybe() else [sequence]
        positions = d.integers(shape, 0, rows, d.choice((torch.int32, torch.int64)))
    options: dict[str, Any] = {
        "interleaved": d.maybe(),
        "positions": positions,
        "heads_first": heads_first,
    }
    angles = torch.rand(rows, rotary // 2, generator=d.generator, dtype=torch.float64) * 6.28
    if name == "rope_from_frequencies":
        frequencies = torch.rand(rotary // 2, generator=d.generator)
        options["scale"] = d.choice((1.0, 1.25))
        case = Case((query, key, frequencies), options, _from_frequencies, gradients=not in_place, roundings=2)
        case.names = ("rope",)
        # fp32 angles of up to 50 have lost 6 bits
        case.roundings = 16 if dtype is torch.float32 else 2
        return case
    options["rotary_dim"] = rotary
    if in_place:
        options["inverse"] = d.maybe(0.3)
    table = dtype if d.maybe() else torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos().to(table), angles.sin().to(table)
    case = Case((query, key, d.laid_out(cos), d.laid_out(sin)), options, roundings=2)
    case.gradients, case.names = not in_place, ("rope",)
    if in_place:
        before = [query.double().clone(), key if key is None else key.double().clone()]
        tables = [x.double() for x in case.args[2:]]
        case.check = lambda _, case: _check_in_place(case, before, tables)
    else:
        case.reference = _rope
    return _spoil(d, case, rows)


def _norm_rope(x: Tensor, weight: Any, cos: Tensor, sin: Tensor, eps: float, weight_offset: float, rotary_dim: int,
               heads_first: bool) -> Any:  # fmt: skip
    normal = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    normal = normal if weight is None else normal * (weight + weight_offset)
    return _rope(normal, None, cos, sin, False, None, heads_first, rotary_dim)


@generates("norm_rope")
def norm_rope(d: Draw, name: str) -> Case:
    dtype, batch, sequence, heads = d.dtype(), d.size(4), d.size(40), d.size(6)
    size = 2 * d.size(40, empty=0.0)
    rotary, heads_first = 2 * d.between(1, size // 2), d.maybe(0.4)
    x = d.tensor([batch, heads, sequence, size] if heads_first else [batch, sequence, heads, size], dtype)
    wide = torch.promote_types(dtype, torch.float32)
    weight = d.some(d.tensor([size], dtype if d.maybe() else wide), 0.8)
    angles = torch.rand(sequence + d.between(0, 9), rotary // 2, generator=d.generator, dtype=torch.float64) * 6.28
    table = dtype if d.maybe() else wide
    cos, sin = (d.laid_out(one.to(table)) for one in (angles.cos(), angles.sin()))
    options = {"eps": 1e-3, "weight_offset": d.choice((0.0, 1.0)), "rotary_dim": rotary, "heads_first": heads_first}
    return Case((x, weight, cos, sin), options, _norm_rope, roundings=8, names=("norm_rope",))


def _check_in_place(case: Case, before: list[Any], tables: list[Tensor]) -> str | None:
    wanted = _rope(before[0], before[1], tables[0], tables[1], **case.options)
    actual = [x for x in case.args[:2] if x is not None]
    for i, (one, two) in enumerate(zip(actual, wanted)):
        if wrong := difference(one, two, case, f"tensor {i}"):
            return wrong
    return None


def _from_frequencies(query: Tensor, key: Any, frequencies: Tensor, scale: float, interleaved: bool, positions: Any,
                      heads_first: bool) -> Any:  # fmt: skip
    rows = 1 + max(
        [query.shape[-2 if heads_first else -3], *(positions.flatten().tolist() if positions is not None else [])]
    )
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies.detach()
    rotary = 2 * frequencies.shape[0]
    return _rope(query, key, angles.cos() * scale, angles.sin() * scale, interleaved, positions, heads_first, rotary)


def _spoil(d: Draw, case: Case, rows: int) -> Case:
    if not d.maybe(0.12):
        return case
    args, way = list(case.args), d.between(0, 3)
    if way == 0 and args[0].numel() and args[0].shape[0]:
        sequence = args[0].shape[-2 if case.options["heads_first"] else -3]
        case.options["positions"] = torch.full([sequence], d.choice((rows, -1, 2**40)))
        case.refused = "a position is outside the table"
    elif way == 1:
        case.options["rotary_dim"], case.refused = d.choice((-2, 3, args[0].shape[-1] + 2)), "rotary_dim is impossible"
    elif way == 2:
        args[3], case.refused = args[3][:, :0], "sin has no columns"
    else:
        args[0], case.refused = torch.ones(list(args[0].shape), dtype=torch.int32), "the query is of integers"
        args[1] = None
    case.args = tuple(args)
    return case


def frequencies_of(rotary_dim: int, base: float = 10000.0, scaling: str = "none", factor: float = 1.0,
                   original_positions: float = 0.0, sequence: float = 0.0, beta_fast: float = 32.0,
                   beta_slow: float = 1.0, attention_factor: float = 0.0, low_frequency_factor: float = 1.0,
                   high_frequency_factor: float = 4.0, **_: Any) -> tuple[Tensor, float]:  # fmt: skip
    """As Hugging Face's models compute them."""
    if scaling in ("ntk", "dynamic") and rotary_dim > 2:
        by = (
            factor
            if scaling == "ntk"
            else factor * max(sequence, original_positions) / original_positions - (factor - 1)
        )
        base = base * by ** (rotary_dim / (rotary_dim - 2))
    powers = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    inverse = base**-powers
    if scaling == "linear":
        return inverse / factor, 1.0
    if scaling == "yarn":

        def turns_at(turns: float) -> float:
            return rotary_dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(turns_at(beta_fast)), 0)
        high = min(math.ceil(turns_at(beta_slow)), rotary_dim - 1)
        places = torch.arange(rotary_dim // 2, dtype=torch.float64)
        ramp = ((places - low) / (max(high, low + 0.001) - low)).clamp(0, 1)
        kept = attention_factor or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
        return inverse / factor * ramp + inverse * (1 - ramp), kept
    if scaling == "llama3":
        lengths = 2 * math.pi / inverse
        smooth = (original_positions / lengths - low_frequency_factor) / (high_frequency_factor - low_frequency_factor)
        mixed = (1 - smooth) * inverse / factor + smooth * inverse
        result = torch.where(lengths > original_positions / low_frequency_factor, inverse / factor, mixed)
        return torch.where(lengths < original_positions / high_frequency_factor, inverse, result), 1.0
    return inverse, 1.0


@generates("rope_frequencies", "rope_tables")
def tables(d: Draw, name: str) -> Case:
    rotary = 2 * d.between(2, 64)
    options: dict[str, Any] = {
        "base": d.choice((10000.0, 500000.0)),
        "scaling": d.choice(("none", "linear", "ntk", "dynamic", "yarn", "llama3")),
        "factor": d.choice((1.0, 2.0, 8.0)),
        "original_positions": d.choice((2048.0, 8192.0)),
        "sequence": d.choice((0.0, 1000.0, 20000.0)),
        "dtype": d.choice((torch.float32, torch.float64)),
    }
    positions = d.size(100)
    args = (rotary,) if name == "rope_frequencies" else (positions, rotary)

    def reference(*args: Any, **options: Any) -> Any:
        inverse, scale = frequencies_of(args[-1], **options)
        if len(args) == 1:
            return [inverse]
        angles = torch.arange(args[0], dtype=torch.float64)[:, None] * inverse
        return [angles.cos() * scale, angles.sin() * scale]

    case = Case(args, options, reference, gradients=False, names=("rope",))
    if d.maybe(0.15):
        way = d.between(0, 2)
        if way == 0:
            case.args, case.refused = (*args[:-1], d.choice((0, -2, 3, 7))), "rotary_dim is odd or not positive"
        elif way == 1:
            case.options["scaling"], case.refused = "cubic", "the scaling is unknown"
        else:
            case.options["base"], case.refused = d.choice((0.0, -1.0, float("nan"))), "the base is not positive"
    return case
