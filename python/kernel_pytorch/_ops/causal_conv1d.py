"""The causal depthwise convolution in front of linear attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .support.declare import differentiable, without_gradient


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:
    """output[t] = activation(bias + sum of weight[:, i] * x[t - width + 1 + i] over i < width), for each channel.

    Args:
        x: [batch, tokens, channels]; fp32, bf16, fp16 and fp64.
        weight: [channels, width], the width 2, 3 or 4; x's type.
        bias: [channels].
        activation: "silu", or None.
        initial_state: [sequences, width - 1, channels]: the inputs in front of each sequence; None: zeros.
        return_state: return (output, final state): the last width - 1 inputs, from which the next tokens go on.
        cu_seqlens: [sequences + 1], int32 or int64, on the device: the batch is 1, and sequence i is tokens
            cu_seqlens[i] up to cu_seqlens[i + 1], with a state of its own.

    Returns:
        [batch, tokens, channels], contiguous; with return_state also the final states, of initial_state's shape. Every
        input has a gradient but cu_seqlens.
    """
    output, state = _forward(x, weight, bias, cu_seqlens, initial_state, activation or "none", return_state)
    return (output, state) if return_state else output


def causal_conv1d_step_(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """`causal_conv1d` of one or a few new tokens, which writes the last inputs into `state`: what decoding needs.

    Args:
        x: [batch, tokens, channels].
        weight: [channels, width].
        state: [batch, width - 1, channels], contiguous; read and written in place, no part of a graph.
        bias: [channels].
        activation: "silu", or None.
    """
    return _in_place(x, weight, bias, None, state, activation or "none")  # type: ignore[no-any-return]


_forward = differentiable("causal_conv1d")
_in_place = without_gradient("causal_conv1d_")
