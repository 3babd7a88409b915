"""Hugging Face's packed experts as one `moe_mlp`: grouped products, nothing sorted or asked on the host.

Which activation an experts module has is found by numbers: what it makes of random rows is compared with each that the
grouped product knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...._ops.grouped_matmul import activation_of, apply_activation
from ....functional import moe_mlp, route_chosen
from ..context import silent

_GATES = ("swiglu", "geglu", "geglu_tanh", "reglu", "glu")
_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
_MOST_EXPERTS, _MOST_CHOSEN = 1024, 16


class Layout(NamedTuple):
    """How an experts module has its weights. transformers' interface says it by attributes, of which older versions
    have fewer; what is not said follows from the weights' shapes."""

    first: str  # the name of the first product's weights
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    has_norm: bool


def layout_of(module: Any) -> Layout | None:
    """None: these are no packed experts."""
    has_gate = hasattr(module, "gate_up_proj")
    first = "gate_up_proj" if has_gate else "up_proj"
    one, two = (getattr(module, name, None) for name in (first, "down_proj"))
    if not (isinstance(one, nn.Parameter) and isinstance(two, nn.Parameter) and one.dim() == two.dim() == 3):
        return None
    if type(getattr(module, "num_experts", None)) is not int:
        return None
    if not hasattr(module, "act_fn") and not (has_gate and hasattr(module, "_apply_gate")):
        return None
    per = 2 if has_gate else 1
    is_plain = one.shape[1] == per * two.shape[2] and one.shape[2] == two.shape[1]
    if not is_plain and not (one.shape[2] == per * two.shape[1] and one.shape[1] == two.shape[2]):
        return None

    def said(name: str, otherwise: bool) -> bool:
        value = vars(module).get(name)
        return value if type(value) is bool else otherwise

    return Layout(
        first,
        has_gate,
        said("has_bias", getattr(module, "down_proj_bias", None) is not None),
        said("is_transposed", not is_plain),
        said("is_concatenated", True),
        said("has_post_expert_norm", False),
    )


def is_parallel(module: Any) -> bool:
    """Whether its experts are on several devices."""
    return bool(getattr(module, "_is_expert_parallel", False))


def gate(module: Any, both: Tensor) -> Tensor:
    """What the module makes of gates and ups."""
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(both)  # type: ignore[no-any-return]
    gates, ups = both.chunk(2, -1)
    return module.act_fn(gates) * ups  # type: ignore[no-any-return]


def forward_of(module: Any, top_k_index: Tensor) -> Callable[..., Any] | None:
    """Another forward for the module, or None where it computes something else."""
    layout = layout_of(module)
    if layout is None or layout.has_norm:
        return None
    if module.num_experts > _MOST_EXPERTS or top_k_index.shape[-1] > _MOST_CHOSEN:
        return None
    found = _activation(module, layout)
    if found is None:
        return None
    name, limits = found
    first = layout.first

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        if torch.compiler.is_compiling() or is_parallel(self) or not silent(self):
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        routing = route_chosen(top_k_index, top_k_weights, self.num_experts)
        return moe_mlp(
            hidden_states,
            routing,
            getattr(self, first),
            self.down_proj,
            gate_up_bias=getattr(self, f"{first}_bias") if layout.has_bias else None,
            down_bias=self.down_proj_bias if layout.has_bias else None,
            activation=name,
            transposed=not layout.is_transposed,
            **limits,
        )

    return forward


def _activation(module: Any, layout: Layout) -> tuple[str, dict[str, float]] | None:
    """The name of its activation and the numbers that it needs."""
    # No gate is like its up, nor like its neighbour.
    rows = ((torch.arange(256) * 37 % 256).float() / 14 - 9).reshape(8, 32)
    try:
        with torch.no_grad():
            wanted = gate(module, rows) if layout.has_gate else module.act_fn(rows)
    except (RuntimeError, TypeError, ValueError):  # a gate of other widths, or one that lives on its own device
        return None
    candidates: list[tuple[str, dict[str, float]]] = [(name, {}) for name in _KINDS]
    if layout.has_gate:
        candidates = [(name, {}) for name in _GATES]
        for prefix in ("", "swiglu_"):  # gpt-oss' names, MiniMax-M3's
            limit, slope = getattr(module, f"{prefix}limit", None), getattr(module, f"{prefix}alpha", None)
            if isinstance(limit, int | float) and isinstance(slope, int | float) and limit > 0:
                candidates.append(("swiglu_clamped", {"limit": float(limit), "slope": float(slope)}))
        candidates += [(f"{name}_interleaved", limits) for name, limits in candidates]
    for name, limits in candidates:
        found = apply_activation(rows, activation_of("experts", name, **limits))
        if found.shape == wanted.shape and torch.allclose(found, wanted.float(), rtol=1e-5, atol=1e-5):
            return name, limits
    return None
