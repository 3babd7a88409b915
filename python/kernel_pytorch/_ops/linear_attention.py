"""Linear attention with gates: forms of arguments, normaliser and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .support.declare import backward, differentiable, without_gradient

# A normaliser closer to zero than this is taken for it.
_LEAST = 1e-6


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gate: Tensor | None = None,
    decay: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
) -> Any:
    """S_t = e^(gate_t + decay) S_(t-1) + key_t value_t^T, output_t = scale * query_t^T S_t, for each head.

    Without gate and decay this is plain linear attention; with decay lightning attention or retention, with a gate for
    each token Mamba-2's SSD, with one for each channel GLA. Gates and decays are logarithms, at most 0.

    Args:
        query, key: [batch, tokens, heads, columns]; fp32, bf16, fp16 and fp64. Their heads may divide those
            of the value: each then serves as many neighbouring heads.
        value: [batch, tokens, heads, values].
        gate: [batch, tokens, heads], or [batch, tokens, heads, columns] for a gate of each channel; the query's type or
            fp32.
        decay: [heads], fp32 (fp64 for fp64); added to every gate.
        scale: of the output; None: 1 / sqrt(columns).
        normalize: divide the output by query_t^T z_t, z being what S would be for values of 1: weights that sum to 1,
            for queries and keys that a feature map has made positive. A state then has one more value, z.
        initial_state: [sequences, heads, columns, values], fp32 (fp64 for fp64); None: zeros.
        return_state: return (output, final state). A sequence may so be given in segments.
        cu_seqlens: [sequences + 1], int32 or int64, on the device: the batch is 1, and sequence i is tokens
            cu_seqlens[i] up to cu_seqlens[i + 1], with a state of its own.
        mode: "chunk" (products of matrices), "recurrent" (token by token), or "auto"; the results are the same up to
            rounding.

    Returns:
        [batch, tokens, heads, values], contiguous, of the query's type; with return_state also the final states, of
        initial_state's shape and type. Every input has a gradient but cu_seqlens.
    """
    options = (decay, cu_seqlens, scale if scale is not None else query.shape[-1] ** -0.5 if query.dim() else 1.0, mode)
    if not normalize:
        return _call(query, key, value, gate, *options, initial_state, return_state)
    values = value.shape[-1]
    of_values = None if initial_state is None else initial_state[..., :values].contiguous()
    of_ones = None if initial_state is None else initial_state[..., values:].contiguous()
    output, state = _call(query, key, value, gate, *options, of_values, True)
    ones = torch.ones((*value.shape[:-1], 1), dtype=value.dtype, device=value.device)
    sums, sum_state = _call(query, key, ones, gate, *options, of_ones, True)
    sums = sums.float() if sums.dtype in (torch.float16, torch.bfloat16) else sums
    divisor = torch.where(sums.abs() < _LEAST, torch.full_like(sums, _LEAST), sums)
    output = (output / divisor).to(query.dtype)
    return (output, torch.cat([state, sum_state], -1)) if return_state else output


def linear_attention_step_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    gate: Tensor | None = None,
    decay: Tensor | None = None,
    scale: float | None = None,
    state_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`linear_attention` of one or a few new tokens, which writes the final states into `state`: what decoding needs.

    Args:
        query, key, value: [batch, tokens, heads, size], as `linear_attention` takes them.
        state: [batch, heads, columns, values], contiguous, fp32 (fp64 for fp64); read and written in place, no part of
            a graph. With state_index a pool of them, [slots, heads, columns, values].
        gate: [batch, tokens, heads] or [batch, tokens, heads, columns], a logarithm.
        decay: [heads], a logarithm added to every gate.
        scale: of the output; None: 1 / sqrt(columns).
        state_index: [sequences], int32 or int64: the state of each sequence in the pool; -1 is a sequence that begins
            with zeros and keeps nothing. No state may be named twice.
        cu_seqlens: as of `linear_attention`: sequences of different numbers of tokens, each with a state.
    """
    scale = scale if scale is not None else query.shape[-1] ** -0.5 if query.dim() else 1.0
    by_token, by_channel = gates_of("linear_attention", gate)
    gates = (by_token, by_channel, decay)
    output = _in_place(query, key, value, *gates, cu_seqlens, state_index, state, scale, "recurrent")
    return output  # type: ignore[no-any-return]


def gates_of(op: str, gate: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(gate of a token, gates of its channels)"""
    if gate is None:
        return None, None
    if gate.dim() not in (3, 4):
        raise RuntimeError(
            f"{op}: gate has shape {list(gate.shape)}; "
            "it must be [batch, tokens, heads] or [batch, tokens, heads, columns]"
        )
    return (gate, None) if gate.dim() == 3 else (None, gate)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    decay: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    mode: str,
    initial_state: Tensor | None,
    return_state: bool,
) -> Any:
    by_token, by_channel = gates_of("linear_attention", gate)
    output, state = _forward(
        query, key, value, by_token, by_channel, decay, cu_seqlens, initial_state, scale, mode, return_state
    )
    return (output, state) if return_state else output


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    query, key, value, gate, channel_gate, decay, cu_seqlens, initial_state, scale, mode = saved
    grad_output, grad_state = grads
    if grad_state is not None and grad_state.numel() == 0 and query.numel() > 0:
        grad_state = None
    if grad_output is None:
        grad_output = torch.zeros_like(value)
    of = _backward(
        grad_output.to(query.dtype),
        query,
        key,
        value,
        gate,
        channel_gate,
        decay,
        cu_seqlens,
        initial_state,
        None if grad_state is None else grad_state.contiguous(),
        scale,
        mode,
        wanted[3] and gate is not None,
        wanted[4] and channel_gate is not None,
        wanted[5] and decay is not None,
        wanted[7] and initial_state is not None,
    )
    grad_query, grad_key, grad_value, *others = of
    grad_gate, grad_channel_gate, grad_decay, grad_initial = others
    return (
        sum_of_group(grad_query, query),
        sum_of_group(grad_key, key),
        grad_value,
        grad_gate if wanted[3] else None,
        grad_channel_gate if wanted[4] else None,
        grad_decay if wanted[5] else None,
        None,
        grad_initial if wanted[7] else None,
    )


def sum_of_group(gradient: Tensor, of: Tensor) -> Tensor:
    """The sum over the heads that one head of `of` serves."""
    if gradient.shape[2] == of.shape[2]:
        return gradient
    return torch.unflatten(gradient, 2, (of.shape[2], gradient.shape[2] // of.shape[2])).sum(3)


_backward = backward("linear_attention")
_forward = differentiable("linear_attention", gradient=_gradient)
_in_place = without_gradient("linear_attention_")
