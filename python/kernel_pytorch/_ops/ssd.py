"""Mamba-2's state space model, a spelling of linear attention with a gate for each token and head."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as torch_functional
from torch import Tensor

from .linear_attention import linear_attention


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mode: str = "auto",
) -> Any:
    """h_t = e^(dt_t A) h_(t-1) + dt_t x_t B_t^T, output_t = h_t C_t + D x_t, for each head.

    Args:
        x: [batch, tokens, heads, size]; fp32, bf16, fp16 and fp64.
        dt: [batch, tokens, heads]: the step of each token.
        A: [heads], negative.
        B, C: [batch, tokens, groups, states]; groups divide the heads, each serves as many neighbouring heads.
        D: [heads] or [heads, size]: how much of x is added to the output.
        dt_bias: [heads], added to dt.
        dt_softplus: take softplus of dt (and its bias).
        dt_limit: between which dt is clamped then.
        initial_state: [sequences, heads, size, states], as Mamba-2 stores it; None: zeros.
        return_state: return (output, final state).
        cu_seqlens: [sequences + 1]: the batch is 1, and sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1].
        mode: "chunk", "recurrent" or "auto"; the results are the same up to rounding.

    Returns:
        [batch, tokens, heads, size] of x's type; with return_state also the final states, fp32. Every tensor has a
        gradient but cu_seqlens.
    """
    wide = dt.float() if dt.itemsize < 4 else dt
    if dt_bias is not None:
        wide = wide + dt_bias
    if dt_softplus:
        wide = torch_functional.softplus(wide)
    if dt_limit != (0.0, float("inf")) or not dt_softplus:
        wide = wide.clamp(*dt_limit)
    # In the type of dt: the product x dt has more digits than x, and the state keeps them.
    output, state = linear_attention(
        C.to(wide.dtype),
        B.to(wide.dtype),
        x * wide[..., None],
        gate=wide * A.to(wide.dtype),
        scale=1.0,
        initial_state=None if initial_state is None else initial_state.to(wide.dtype).transpose(2, 3),
        return_state=True,
        cu_seqlens=cu_seqlens,
        mode=mode,
    )
    if D is not None:
        output = output + x * (D if D.dim() == 2 else D[:, None])
    output = output.to(x.dtype)
    return (output, state.transpose(2, 3)) if return_state else output
