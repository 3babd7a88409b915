"""Hugging Face's packed experts: rows sorted by expert, each expert's products ours with its gate in one pass.

Experts of a mixture are one module there: weights [experts, ...] and forward(rows, chosen experts, their weights). What
it computes is read from its weights and attributes (grouped_experts.layout_of), and verified by numbers.
The first way is `moe_mlp` (grouped_experts.py). The second asks how many rows an expert gets once per call, which waits
for a GPU, and takes gates that the first does not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....core._products import product
from ....functional import gated_activation_packed
from ...changes import SetForward, mark
from ...sites import Call, Found, Proposal, Refusal, Way
from ..activations import kind_of
from ..context import Context, silent, weight_reason, why_not_plain
from . import grouped_experts
from .grouped_experts import Layout

NAME = "experts (Hugging Face)"
_GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    layout = grouped_experts.layout_of(module)
    if layout is None:
        return None
    reason = why_not_plain("", module) or weight_reason(module)
    if reason is None and len(call.args) + len(call.kwargs) != 3:
        reason = "it takes other arguments than rows, experts and weights"
    if reason is None and grouped_experts.is_parallel(module):
        reason = "its experts are on several devices"
    if reason:
        return Refusal(path, NAME, reason)
    ways = []
    index = next((one for one in call.tensors() if not one.is_floating_point()), None)
    if index is not None and (grouped := grouped_experts.forward_of(module, index)) is not None:
        ways.append(Way("kernel_pytorch moe_mlp", lambda: SetForward(module, mark(grouped))))
    forward = _forward(layout, _gate_of(module, layout))
    source = f"{type(module).__name__}, {module.num_experts} experts"
    words = "rows sorted by expert, kernel_pytorch products and gate"
    ways.append(Way(words, lambda: SetForward(module, mark(forward))))
    return Proposal(NAME, path, module, source, ways)


def _gate_of(module: Any, layout: Layout) -> str | None:
    """The activation of the gate where the gate is transformers' own, and the columns are gate, then up."""
    own = getattr(type(module), "_apply_gate", None)
    is_default = own is None or getattr(own, "__name__", "") == "_default_apply_gate"
    kind = kind_of(module.act_fn) if layout.has_gate and layout.is_concatenated and is_default else None
    return kind if kind in _GATES else None


def _forward(layout: Layout, gate: str | None) -> Any:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        called = ("post_expert_norm",) if gate is not None else tuple(self._modules)
        if torch.compiler.is_compiling() or grouped_experts.is_parallel(self) or not silent(self, called):
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        tokens, chosen = top_k_index.shape
        order = top_k_index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts).tolist()
        if not order.numel():
            return torch.zeros_like(hidden_states)
        both = _products(self, layout, layout.first, hidden_states[order // chosen], counts)
        if gate is not None:
            hidden = gated_activation_packed(both, gate)
        else:
            hidden = grouped_experts.gate(self, both) if layout.has_gate else self.act_fn(both)
        output = _products(self, layout, "down_proj", hidden, counts)
        if layout.has_norm:
            output = self.post_expert_norm(output)
        output = torch.empty_like(output).index_copy(0, order, output)  # back to the order of the tokens
        weighted = output.view(tokens, chosen, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    return forward


def _products(module: Any, layout: Layout, name: str, rows: Tensor, counts: list[int]) -> Tensor:
    """Each expert's rows, which follow one another, times its weight."""
    weights = getattr(module, name).unbind(0)
    biases = getattr(module, f"{name}_bias").unbind(0) if layout.has_bias else (None,) * len(counts)
    found = [
        product(part, weight.t() if layout.is_transposed else weight, bias)
        for part, weight, bias in zip(torch.split(rows, counts), weights, biases)
        if len(part)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)
