"""linear_attention, delta_rule and their steps, against the recurrence token by token."""

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
    slots = batch + d.between(0, 2)
    start = d.normal((slots, heads, columns, values), state_dtype)
    index = torch.randperm(slots, generator=d.generator)[:batch]
    args = [d.tensor((batch, tokens, heads // group, columns), dtype) for _ in range(2)]
    value = d.tensor((batch, tokens, heads, values), dtype)
    options: dict[str, Any] = {"state_index": index}
    if d.maybe():
        options["gate"] = -d.normal((batch, tokens, heads), dtype, 0.2).abs()

    def reference(query: Tensor, key: Tensor, value: Tensor, state: Tensor, **options: Any) -> Any:
        chosen = start.double()[options.pop("state_index").long()]
        return _scan(query, key, value, initial_state=chosen, **options)

    return Case(
        (*args, value, start.clone()),
        options,
        reference,
        terms=columns * tokens,
        roundings=4,
        gradients=False,
        names=("linear_attention",),
    )


def _delta_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    gate: Tensor | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
) -> Any:
    batch, tokens, heads, values = value.shape
    columns = query.shape[-1]
    if normalize_qk:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    ends = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        start = None if initial_state is None else initial_state[i : i + 1] if cu_seqlens is not None else initial_state
        state = value.new_zeros(batch, heads, columns, values) if start is None else start
        for t in range(begin, end):
            if gate is not None:
                state = state * (gate[:, t] if gate.dim() == 4 else gate[:, t, :, None]).exp()[..., None]
            error = value[:, t] - (key[:, t, :, None] @ state)[:, :, 0]
            state = state + key[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None]
            outputs.append((query[:, t, :, None] @ state)[:, :, 0] * (columns**-0.5 if scale is None else scale))
        states.append(state)
    outputs += [value.new_zeros(batch, heads, values)] * (tokens - len(outputs))
    output = torch.stack(outputs, 1) if outputs else value
    return (output, torch.cat(states)) if return_state else output


@generates("delta_rule")
def delta_rule(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    batch, tokens, heads, group, columns, values = _sizes(d)
    is_packed = d.maybe(0.3)
    batch = 1 if is_packed else batch
    key_shape = (batch, tokens, d.choice((heads, heads // group)), columns)
    normalizes = d.maybe()
    key = d.normal(key_shape, dtype) if normalizes else d.normal(key_shape, dtype, 0.7 * columns**-0.5)
    beta = d.laid_out(d.normal((batch, tokens, heads), d.choice((dtype, state_dtype))).sigmoid())
    case = Case(
        (
            d.tensor((batch, tokens, heads // group, columns), dtype),
            d.laid_out(key),
            d.tensor((batch, tokens, heads, values), dtype),
            beta,
        ),
        {"return_state": d.maybe(), "mode": d.choice(("auto", "chunk", "recurrent")), "normalize_qk": normalizes},
        _delta_scan,
        terms=columns * max(tokens, 1),
        roundings=6,
        names=("delta_rule",),
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
        case.options["initial_state"] = d.normal((sequences, heads, columns, values), state_dtype)
    if d.maybe(0.3):
        case.options["scale"] = d.number(0.1, 2)
    return case


@generates("delta_rule_step_")
def delta_rule_step_(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    batch, _, heads, group, columns, values = _sizes(d)
    tokens = d.between(1, 4)
    slots = batch + d.between(0, 2)
    start = d.normal((slots, heads, columns, values), state_dtype)
    index = torch.randperm(slots, generator=d.generator)[:batch]
    query, key = (d.tensor((batch, tokens, heads // group, columns), dtype) for _ in range(2))
    value = d.tensor((batch, tokens, heads, values), dtype)
    beta = d.normal((batch, tokens, heads), dtype).sigmoid()
    options: dict[str, Any] = {"state_index": index, "normalize_qk": True}
    if d.maybe():
        options["gate"] = -d.normal((batch, tokens, heads), dtype, 0.2).abs()

    def reference(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, state: Tensor, **options: Any) -> Any:
        chosen = start.double()[options.pop("state_index").long()]
        return _delta_scan(query, key, value, beta, initial_state=chosen, **options)

    return Case(
        (query, key, value, beta, start.clone()),
        options,
        reference,
        terms=columns * tokens,
        roundings=6,
        gradients=False,
        names=("delta_rule",),
    )


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    ends = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        start = None if initial_state is None else initial_state[i : i + 1] if cu_seqlens is not None else initial_state
        start = x.new_zeros(batch, width - 1, channels) if start is None else start
        inputs = torch.cat([start, x[:, begin:end]], 1)
        total = sum(weight[:, j] * inputs[:, j : j + end - begin] for j in range(width))
        outputs.append(total if bias is None else total + bias)
        states.append(inputs[:, inputs.shape[1] - width + 1 :])
    output = torch.cat(outputs, 1) if outputs else x[:, :0]
    output = torch.nn.functional.silu(output) if activation == "silu" else output
    output = torch.cat([output, x.new_zeros(batch, tokens - output.shape[1], channels)], 1)
    state = torch.cat(states) if states else x.new_zeros(0, width - 1, channels)
    return (output, state) if return_state else output


@generates("causal_conv1d")
def causal_conv1d(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    tokens, channels, width = d.choice((0, 1, 2, 3, 5, 30, 70, 530)), d.size(70), d.between(2, 4)
    is_packed = d.maybe(0.3)
    batch = 1 if is_packed else d.between(1, 3)
    case = Case(
        (d.tensor((batch, tokens, channels), dtype), d.normal((channels, width), dtype)),
        {"activation": d.choice((None, "silu")), "return_state": d.maybe()},
        _convolution,
        terms=width * max(tokens, 1),
        roundings=3,
        names=("causal_conv1d",),
    )
    sequences = batch
    if is_packed:
        ends = sorted(d.between(0, tokens) for _ in range(d.between(1, 3)))
        case.options["cu_seqlens"] = torch.tensor([0, *ends], dtype=d.choice((torch.int32, torch.int64)))
        sequences = len(ends)
    if d.maybe():
        case.options["bias"] = d.normal((channels,), dtype)
    if d.maybe(0.4):
        case.options["initial_state"] = d.normal((sequences, width - 1, channels), dtype)
    return case


@generates("causal_conv1d_step_")
def causal_conv1d_step_(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    batch, tokens, channels, width = d.between(1, 3), d.between(1, 5), d.size(70), d.between(2, 4)
    start = d.normal((batch, width - 1, channels), dtype)

    def reference(x: Tensor, weight: Tensor, state: Tensor, **options: Any) -> Any:
        return _convolution(x, weight, initial_state=start.double(), **options)

    return Case(
        (d.tensor((batch, tokens, channels), dtype), d.normal((channels, width), dtype), start.clone()),
        {"activation": d.choice((None, "silu"))},
        reference,
        terms=width,
        roundings=3,
        gradients=False,
        names=("causal_conv1d",),
    )


def _mamba(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt.clamp(min=0)
    B, C = (one.repeat_interleave(x.shape[2] // one.shape[2], 2) for one in (B, C))
    state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        state = state * (dt[:, t] * A).exp()[..., None, None] + added
        outputs.append((state * C[:, t, :, None]).sum(-1))
    output = torch.stack(outputs, 1) if outputs else x
    if D is not None:
        output = output + x * (D if D.dim() == 2 else D[:, None])
    return (output, state) if return_state else output


@generates("ssd")
def ssd(d: Draw, name: str) -> Case:
    dtype = d.dtype()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    batch, tokens, heads, group, size, states = _sizes(d)
    case = Case(
        (
            d.tensor((batch, tokens, heads, size), dtype),
            d.normal((batch, tokens, heads), wide),
            -d.normal((heads,), wide).abs(),
            *(d.tensor((batch, tokens, heads // group, states), dtype) for _ in range(2)),
        ),
        {"dt_softplus": d.maybe(), "return_state": d.maybe()},
        _mamba,
        terms=states * max(tokens, 1),
        roundings=8,
        names=("ssd", "linear_attention"),
    )
    if d.maybe():
        case.options["D"] = d.normal((heads, size) if d.maybe() else (heads,), dtype)
    if d.maybe():
        case.options["dt_bias"] = d.normal((heads,), wide)
    if d.maybe(0.4):
        case.options["initial_state"] = d.normal((batch, heads, size, states), wide)
    return case
