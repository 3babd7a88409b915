"""The delta rule with gates: forms of arguments and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .linear_attention import gates_of, sum_of_group
from .support.declare import backward, differentiable, without_gradient


def delta_rule(
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
    """S' = e^gate_t S_(t-1), S_t = S' + key_t (beta_t (value_t - S'^T key_t))^T, output_t = scale * S_t^T query_t.

    Without a gate this is DeltaNet, with one for each token Gated DeltaNet, with one for each channel KDA. Gates are
    logarithms, at most 0. Keys should have length 1 and betas lie in (0, 2): the recurrence grows otherwise.

    Args:
        query, key: [batch, tokens, heads, columns]; fp32, bf16, fp16 and fp64. Their heads may divide those
            of the value: each then serves as many neighbouring heads.
        value: [batch, tokens, heads, values].
        beta: how much of what the state answers to a key is replaced, [batch, tokens, heads]; the query's type or fp32.
        gate: [batch, tokens, heads], or [batch, tokens, heads, columns] for a gate of each channel; the query's type or
            fp32.
        scale: of the output; None: 1 / sqrt(columns).
        normalize_qk: first divide each row of query and key by sqrt(its sum of squares + 1e-6).
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
    by_token, by_channel = gates_of("delta_rule", gate)
    scale = _scale_of(query, scale)
    output, state = _forward(
        query,
        key,
        value,
        beta,
        by_token,
        by_channel,
        cu_seqlens,
        initial_state,
        scale,
        normalize_qk,
        mode,
        return_state,
    )
    return (output, state) if return_state else output


def delta_rule_step_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    gate: Tensor | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    state_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`delta_rule` of one or a few new tokens, which writes the final states into `state`: what decoding needs.

    Args:
        query, key, value, beta: as `delta_rule` takes them.
        state: [batch, heads, columns, values], contiguous, fp32 (fp64 for fp64); read and written in place, no part of
            a graph. With state_index a pool of them, [slots, heads, columns, values].
        gate: [batch, tokens, heads] or [batch, tokens, heads, columns], a logarithm.
        scale: of the output; None: 1 / sqrt(columns).
        normalize_qk: as of `delta_rule`.
        state_index: [batch], int32 or int64: the state of each sequence in the pool; -1 is a sequence that begins
            with zeros and keeps nothing. No state may be named twice.
        cu_seqlens: as of `delta_rule`: sequences of different numbers of tokens, each with a state.
    """
    gates = gates_of("delta_rule", gate)
    options = (_scale_of(query, scale), normalize_qk, "recurrent")
    output = _in_place(query, key, value, beta, *gates, cu_seqlens, state_index, state, *options)
    return output  # type: ignore[no-any-return]


def _scale_of(query: Tensor, scale: float | None) -> float:
    return scale if scale is not None else query.shape[-1] ** -0.5 if query.dim() and query.shape[-1] else 1.0


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    query, key, value, beta, gate, channel_gate, cu_seqlens, initial_state, scale, normalize_qk = saved
    grad_output, grad_state = grads
    if grad_state is not None and grad_state.numel() == 0:
        grad_state = None
    if grad_output is None:
        grad_output = torch.zeros_like(value)
    grad_query, grad_key, grad_value, grad_beta, grad_gate, grad_channel_gate, grad_initial = _backward(
        grad_output.to(query.dtype),
        query,
        key,
        value,
        beta,
        gate,
        channel_gate,
        cu_seqlens,
        initial_state,
        None if grad_state is None else grad_state.contiguous(),
        scale,
        normalize_qk,
        wanted[4] and gate is not None,
        wanted[5] and channel_gate is not None,
        wanted[7] and initial_state is not None,
    )
    return (
        sum_of_group(grad_query, query),
        sum_of_group(grad_key, key),
        grad_value,
        grad_beta,
        grad_gate if wanted[4] else None,
        grad_channel_gate if wanted[5] else None,
        None,
        grad_initial if wanted[7] else None,
    )


_backward = backward("delta_rule")
_forward = differentiable("delta_rule", gradient=_gradient)
_in_place = without_gradient("delta_rule_")
