"""linear_attention and its step, against the recurrence token by token."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .draw import Draw
from .run import generates


def _scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gate: Tensor | None = None,
    decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
) -> Any:
    batch, tokens, heads, values = value.shape
    columns = query.shape[-1]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    ends = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        start = None if initial_state is None else initial_state[i : i + 1] if cu_seqlens is not None else initial_state
        state = value.new_zeros(batch, heads, columns, values) if start is None else start
        for t in range(begin, end):
            log = value.new_zeros(batch, heads, 1)
            if gate is not None:
                log = log + (gate[:, t] if gate.dim() == 4 else gate[:, t, :, None])
            if decay is not None:
                log = log + decay[:, None]
            state = state * log.exp()[..., None] + key[:, t, :, :, None] * value[:, t, :, None, :]
            outputs.append((query[:, t, :, None] @ state)[:, :, 0] * (columns**-0.5 if scale is None else scale))
        states.append(state)
    outputs += [value.new_zeros(batch, heads, values)] * (tokens - len(outputs))
    output = torch.stack(outputs, 1) if outputs else value
    return (output, torch.cat(states)) if return_state else output


def _sizes(d: Draw) -> tuple[int, int, int, int, int, int]:
    group = d.choice((1, 1, 2, 3))
    heads = d.between(1, 3) * group
    return d.between(1, 2), d.choice((0, 1, 2, 5, 30, 49, 70)), heads, group, d.between(1, 20), d.between(1, 20)


@generates("linear_attention")
def linear_attention(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    batch, tokens, heads, group, columns, values = _sizes(d)
    is_packed = d.maybe(0.3)
    batch = 1 if is_packed else batch
    shapes = [(batch, tokens, heads // group, columns), (batch, tokens, d.choice((heads, heads // group)), columns)]
    case = Case(
        (*(d.tensor(shape, dtype) for shape in shapes), d.tensor((batch, tokens, heads, values), dtype)),
        {"return_state": d.maybe(), "mode": d.choice(("auto", "chunk", "recurrent"))},
        _scan,
        terms=columns * max(tokens, 1),
        roundings=4,
        names=("linear_attention",),
    )
    sequences = batch
    if is_packed:
        ends = sorted(d.between(0, tokens) for _ in range(d.between(1, 3)))
        case.options["cu_seqlens"] = torch.tensor([0, *ends], dtype=d.choice((torch.int32, torch.int64)))
        sequences = len(ends)
    if d.maybe():
        shape = (batch, tokens, heads) if d.maybe() else (batch, tokens, heads, columns)
        strength = d.choice((0.0, 0.1, 1.0))
        case.options["gate"] = d.laid_out(-d.normal(shape, d.choice((dtype, state_dtype)), strength).abs())
    if d.maybe(0.4):
        case.options["decay"] = -d.normal((heads,), state_dtype, 0.3).abs()
    if d.maybe(0.4):
        case.options["initial_state"] = d.normal((sequences, heads, columns, values), state_dtype)
    if d.maybe(0.3):
        case.options["scale"] = d.number(0.1, 2)
    if d.maybe(0.05):
        case.args = (case.args[0], torch.ones(shapes[1], dtype=torch.int32), case.args[2])
        case.refused = "key is of integers"
    return case


@generates("linear_attention_step_")
def linear_attention_step_(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    batch, _, heads, group, columns, values = _sizes(d)
    tokens = d.between(1, 4)
    start = d.normal((batch, heads, columns, values), state_dtype)
    args = [d.tensor((batch, tokens, heads // group, columns), dtype) for _ in range(2)]
    value = d.tensor((batch, tokens, heads, values), dtype)
    options = {"gate": -d.normal((batch, tokens, heads), dtype, 0.2).abs()} if d.maybe() else {}

    def reference(query: Tensor, key: Tensor, value: Tensor, state: Tensor, **options: Any) -> Any:
        return _scan(query, key, value, initial_state=start.double(), **options)

    return Case(
        (*args, value, start.clone()),
        options,
        reference,
        terms=columns * tokens,
        roundings=4,
        gradients=False,
        names=("linear_attention",),
    )
