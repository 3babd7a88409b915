"""Hugging Face's packed experts as one `moe_mlp`: grouped products, nothing sorted or asked on the host.

Which activation an experts module has is found by numbers: what it makes of random rows is compared with each that the
grouped product knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...._ops.grouped_matmul import activation_of, apply_activation
from ....functional import moe_mlp, route_chosen
from ..context import silent

_GATES = ("swiglu", "geglu", "geglu_tanh", "reglu", "glu")
_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
_MOST_EXPERTS, _MOST_CHOSEN = 1024, 16


def forward_of(module: Any, top_k_index: Tensor) -> Callable[..., Any] | None:
    """Another forward for the module, or None where it computes something else."""
    if module.has_post_expert_norm or module.num_experts > _MOST_EXPERTS or top_k_index.shape[-1] > _MOST_CHOSEN:
        return None
    found = _activation(module)
    if found is None:
        return None
    name, limits = found
    first = "gate_up_proj" if module.has_gate else "up_proj"

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        if torch.compiler.is_compiling() or self._is_expert_parallel or not silent(self):
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        routing = route_chosen(top_k_index, top_k_weights, self.num_experts)
        return moe_mlp(
            hidden_states,
            routing,
            getattr(self, first),
            self.down_proj,
            gate_up_bias=getattr(self, f"{first}_bias") if self.has_bias else None,
            down_bias=self.down_proj_bias if self.has_bias else None,
            activation=name,
            transposed=not self.is_transposed,
            **limits,
        )

    return forward


def _activation(module: Any) -> tuple[str, dict[str, float]] | None:
    """The name of its activation and the numbers that it needs."""
    rows = ((torch.arange(256) * 37 % 256).float() / 14 - 9).reshape(
        8, 32
    )  # no gate is like its up, nor like its neighbour
    try:
        with torch.no_grad():
            wanted = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    except (RuntimeError, TypeError, ValueError):  # a gate of other widths, or one that lives on its own device
        return None
    candidates: list[tuple[str, dict[str, float]]] = [(name, {}) for name in _KINDS]
    if module.has_gate:
        limit, slope = getattr(module, "limit", None), getattr(module, "alpha", None)
        candidates = [(name, {}) for name in _GATES]
        if isinstance(limit, int | float) and isinstance(slope, int | float) and limit > 0:
            candidates.append(("swiglu_clamped", {"limit": float(limit), "slope": float(slope)}))
        candidates += [(f"{name}_interleaved", limits) for name, limits in candidates]
    for name, limits in candidates:
        found = apply_activation(rows, activation_of("experts", name, **limits))
        if found.shape == wanted.shape and torch.allclose(found, wanted.float(), rtol=1e-5, atol=1e-5):
            return name, limits
    return None
