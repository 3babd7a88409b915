"""Experts in few bits: the matrices of a MoELayer, and Hugging Face's packed experts.

transformers keeps the experts of a mixture as one module with weights [experts, ...] and a forward of rows, the experts
chosen for each and their weights; some sixty of its architectures do. QuantizedExperts is such a module whose products
decode codes on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..._ops.quantized_grouped_matmul import quantized_grouped_matmul
from ..._ops.quantized_matmul import QuantizedWeight
from ..quantized_linear import QuantizedBuffers


class QuantizedMatrices(QuantizedBuffers):
    """The weights of experts [experts, rows, columns] in few bits, in the place of a parameter.

    Args:
        weight: what quantize_weight made of [experts * rows, columns].
        experts: how many there are.
        dtype: of what `dequantize` gives.
    """

    def __init__(self, weight: QuantizedWeight, experts: int, dtype: torch.dtype) -> None:
        super().__init__(weight, dtype)
        self.experts = experts

    @property
    def shape(self) -> torch.Size:
        rows, columns = self.quantized_weight.shape
        return torch.Size((self.experts, rows // max(self.experts, 1), columns))

    def dequantize(self) -> Tensor:
        """[experts, rows, columns]."""
        return self.quantized_weight.dequantize(self.dtype).view(self.shape)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, format={self.format}, group={self.group}"


class QuantizedExperts(nn.Module):
    """Hugging Face's experts with weights in few bits.

    Args:
        plain: the module; its weights are given up, its gate, activation and norm are called.
        matrices: by the names of its weights, each stored as linear layers store theirs.
    """

    def __init__(self, plain: Any, matrices: dict[str, QuantizedMatrices]) -> None:
        super().__init__()
        self.num_experts = plain.num_experts
        self.first = first_of(plain)
        for name, one in matrices.items():
            del plain._parameters[name]
            self.add_module(name, one)
        for name in (f"{self.first}_bias", "down_proj_bias"):
            self.register_parameter(name, plain._parameters.pop(name, None) if plain.has_bias else None)
        self.plain = plain
        self.train(plain.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, features], top_k_index and top_k_weights [tokens, chosen] -> as hidden_states.

        An index of num_experts or more chooses none.
        """
        tokens, chosen = top_k_index.shape
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        numbers = torch.arange(self.num_experts, device=experts.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, numbers, right=True).int()
        both = self._product(self.first, hidden_states, ends, (order // chosen).int())
        hidden = self.plain._apply_gate(both) if self.plain.has_gate else self.plain.act_fn(both)
        output = self._product("down_proj", hidden, ends, None)
        if self.plain.has_post_expert_norm:
            output = self.plain.post_expert_norm(output)
        output = torch.empty_like(output).index_copy(0, order, output)  # back to the order of the tokens
        is_chosen = (top_k_index < self.num_experts).unsqueeze(-1)
        weighted = output.view(tokens, chosen, output.shape[1]) * top_k_weights.unsqueeze(-1)
        return torch.where(is_chosen, weighted, 0).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, x: Tensor, ends: Tensor, gather: Tensor | None) -> Tensor:
        matrices = self._modules[name]
        assert isinstance(matrices, QuantizedMatrices)
        bias = self._parameters[f"{name}_bias"]
        return quantized_grouped_matmul(
            x, matrices.quantized_weight, ends, groups=self.num_experts, bias=bias, gather=gather
        )


_FLAGS = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_apply_gate")


def is_packed_experts(module: nn.Module) -> bool:
    """Whether it is Hugging Face's: by what its interface for experts gives every such module."""
    if isinstance(module, QuantizedExperts) or not all(hasattr(module, name) for name in _FLAGS):
        return False
    weights = [module._parameters.get(name) for name in (first_of(module), "down_proj")]
    return all(one is not None and one.dim() == 3 and one.numel() > 0 for one in weights)


def first_of(module: Any) -> str:
    """The name of the weights before the activation."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def quantized_experts(module: Any, quantized: Callable[[Tensor], QuantizedWeight]) -> QuantizedExperts:
    """What becomes of Hugging Face's experts, one matrix after the other."""
    matrices = {}
    for name in (first_of(module), "down_proj"):
        weight = module._parameters[name].detach()
        rows = weight.transpose(1, 2) if module.is_transposed else weight
        matrices[name] = QuantizedMatrices(quantized(rows.flatten(0, 1)), module.num_experts, weight.dtype)
    return QuantizedExperts(module, matrices)


def matrix_shape(module: Any, name: str) -> torch.Size:
    """Of a parameter of experts, as its codes have it: [experts, rows, columns]."""
    weight: Tensor = module._parameters[name]
    return weight.transpose(1, 2).shape if getattr(module, "is_transposed", False) else weight.shape
