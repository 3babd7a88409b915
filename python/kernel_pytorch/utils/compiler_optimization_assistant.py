"""How long an attention layer takes: one call that times it and tells the spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .profiling import KernelProfiler

import torch  # isort: skip
from torch import nn  # isort: skip

__all__ = ["benchmark_attention_performance"]


def benchmark_attention_performance(
    model: nn.Module, input_shape: Sequence[int], num_trials: int = 100
) -> dict[str, Any]:
    """Times model(x) without gradients in evaluation mode; nn.MultiheadAttention gets x as query, key and value.

    Args:
        model: an attention layer; its mode is restored.
        input_shape: of x, [batch, sequence, d_model]. x is random, of the model's dtype, on its device.
        num_trials: runs that are timed, after a tenth as many that are not.

    Returns:
        Milliseconds: "avg_latency", "median_latency", "p25_latency", "p75_latency", "min_latency", "max_latency", and
        "spread", half the distance between the quartiles; "tokens_per_second" by the median; "num_trials", "device" and
        "dtype".
    """
    shape = tuple(input_shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"benchmark_attention_performance: input_shape is {shape}; it must be (batch, sequence, d_model)"
        )
    if num_trials < 2:
        raise ValueError(
            f"benchmark_attention_performance: num_trials is {num_trials}; two are the least with a spread"
        )
    first = next((tensor for tensor in [*model.parameters(), *model.buffers()] if tensor.is_floating_point()), None)
    device = first.device if first is not None else torch.device("cpu")
    dtype = first.dtype if first is not None else torch.float32
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    inputs = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            samples = KernelProfiler(device).sample({"model": model}, inputs, num_trials, max(1, num_trials // 10))
    finally:
        model.train(was_training)
    milliseconds = [value / 1e3 for value in samples["model"]]
    p25, median, p75 = statistics.quantiles(milliseconds, n=4)
    return {
        "avg_latency": statistics.fmean(milliseconds),
        "median_latency": median,
        "p25_latency": p25,
        "p75_latency": p75,
        "min_latency": min(milliseconds),
        "max_latency": max(milliseconds),
        "spread": (p75 - p25) / 2,
        "tokens_per_second": shape[0] * shape[1] / (median / 1e3),
        "num_trials": num_trials,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
