"""Layers of linear attention: projections around functional.linear_attention, whose state they can go on from."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F


class _LinearAttention(nn.Module):
    """Queries, keys and values of each head, the recurrence, a norm of each head, a gate of the output, projections."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        norm_eps: float = 1e-5,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.key_dim, self.value_dim = key_dim or embed_dim, value_dim or embed_dim
        name = type(self).__name__
        for what, size in (("key_dim", self.key_dim), ("value_dim", self.value_dim)):
            if size % num_heads != 0:
                raise ValueError(f"{name}: {what} is {size}, num_heads is {num_heads}; heads must divide it")
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, self.key_dim, **made)
        self.k_proj = nn.Linear(embed_dim, self.key_dim, **made)
        self.v_proj = nn.Linear(embed_dim, self.value_dim, **made)
        self.g_proj = nn.Linear(embed_dim, self.value_dim, **made)
        self.out_proj = nn.Linear(self.value_dim, embed_dim, **made)
        self.norm_eps = norm_eps
        self.norm_weight = nn.Parameter(torch.ones(self.value_dim // num_heads, device=device, dtype=dtype))

    def forward(
        self,
        x: Tensor,
        *,
        state: Tensor | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """x [batch, tokens, embed_dim]; with return_state also the state that the next tokens go on from."""
        query, key, value = (
            proj(x).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self._features(query), self._features(key)
        output, state = F.linear_attention(
            query,
            key,
            value,
            **self._gates(x),
            initial_state=state,
            return_state=True,
            cu_seqlens=cu_seqlens,
        )
        normed = F.rms_norm(output, self.norm_weight, self.norm_eps).flatten(-2)
        result = self.out_proj(F.swiglu(self.g_proj(x), normed))
        return (result, state) if return_state else result

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, key_dim={self.key_dim}, value_dim={self.value_dim}"

    def _features(self, x: Tensor) -> Tensor:
        return x

    def _gates(self, x: Tensor) -> dict[str, Any]:
        raise NotImplementedError


class GatedLinearAttention(_LinearAttention):
    """GLA: a gate of each channel of the key, log sigmoid of a low-rank projection, divided by a temperature.

    Args:
        embed_dim, num_heads: of the layer.
        key_dim, value_dim: of all heads together; None: embed_dim.
        gate_rank: of the gate's projection.
        gate_temperature: the logarithm of the gate is divided by it, so that states live longer.
        norm_eps: of the norm of each head's output.
        bias: of the projections.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, gate_rank: int = 16, gate_temperature: float = 16.0, **options: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        made = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.gate_temperature = gate_temperature
        self.gate_down = nn.Linear(embed_dim, gate_rank, bias=False, **made)
        self.gate_up = nn.Linear(gate_rank, self.key_dim, bias=True, **made)

    def _gates(self, x: Tensor) -> dict[str, Any]:
        gate = nn.functional.logsigmoid(self.gate_up(self.gate_down(x)).float()) / self.gate_temperature
        return {"gate": torch.unflatten(gate, -1, (self.num_heads, -1))}


class LightningAttention(_LinearAttention):
    """Lightning attention: a constant decay of each head, slopes as ALiBi's; queries and keys through silu.

    Args:
        embed_dim, num_heads: of the layer.
        layer_idx, num_layers: deeper layers decay less: slopes are multiplied by 1 - layer_idx / num_layers.
        key_dim, value_dim, norm_eps, bias: as of GatedLinearAttention.
    """

    decay: Tensor

    def __init__(
        self, embed_dim: int, num_heads: int, *, layer_idx: int = 0, num_layers: int = 1, **options: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        if not 0 <= layer_idx < num_layers:
            raise ValueError(f"LightningAttention: layer_idx is {layer_idx}, of {num_layers} layers; it must be one")
        slopes = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1, dtype=torch.float32) / num_heads)
        decay = -slopes * (1 - layer_idx / num_layers)
        self.register_buffer("decay", decay.to(options.get("device")), persistent=False)

    def _features(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def _gates(self, x: Tensor) -> dict[str, Any]:
        return {"decay": self.decay.float()}


class DeltaNetState(NamedTuple):
    """What the next tokens of a GatedDeltaNet go on from."""

    inputs: Tensor  # [batch, conv_size - 1, channels]: of the short convolution
    memory: Tensor  # [batch, heads, columns, values], fp32


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet: a short convolution, the delta rule with a gate of each token, a norm of each head, a gate.

    Args:
        embed_dim: of the layer.
        num_heads: of the values.
        num_key_heads: of queries and keys, which divide num_heads; None: num_heads.
        key_dim, value_dim: of all heads together; None: embed_dim.
        conv_size: tokens that the short convolution sees: 2, 3 or 4.
        norm_eps: of the norm of each head's output.
        bias: of the projections.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.num_key_heads = embed_dim, num_heads, num_key_heads or num_heads
        self.key_dim, self.value_dim = key_dim or embed_dim, value_dim or embed_dim
        for what, size, heads in (
            ("key_dim", self.key_dim, self.num_key_heads),
            ("value_dim", self.value_dim, num_heads),
            ("num_heads", num_heads, self.num_key_heads),
        ):
            if size % heads != 0:
                raise ValueError(f"GatedDeltaNet: {what} is {size}; {heads} heads must divide it")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        channels = 2 * self.key_dim + self.value_dim
        self.qkv_proj = nn.Linear(embed_dim, channels, bias=bias, **made)
        self.beta_proj = nn.Linear(embed_dim, num_heads, bias=bias, **made)
        self.gate_proj = nn.Linear(embed_dim, num_heads, bias=False, **made)
        self.g_proj = nn.Linear(embed_dim, self.value_dim, bias=bias, **made)
        self.out_proj = nn.Linear(self.value_dim, embed_dim, bias=bias, **made)
        self.conv_weight = nn.Parameter(torch.empty(channels, conv_size, **made))
        nn.init.uniform_(self.conv_weight, -(conv_size**-0.5), conv_size**-0.5)
        # A gate is -e^log_rate softplus(gate_proj(x) + gate_bias): it begins between e^-0.001 and e^-1.6 of a token.
        self.log_rate = nn.Parameter(torch.empty(num_heads, **made).uniform_(1, 16).log())
        step = torch.empty(num_heads, **made).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.gate_bias = nn.Parameter(step + (-torch.expm1(-step)).log())  # softplus of it is step
        self.norm_eps = norm_eps
        self.norm_weight = nn.Parameter(torch.ones(self.value_dim // num_heads, **made))

    def forward(
        self,
        x: Tensor,
        *,
        state: DeltaNetState | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """x [batch, tokens, embed_dim]; with return_state also the state that the next tokens go on from."""
        projected = self.qkv_proj(x)
        mixed, inputs = F.causal_conv1d(
            projected,
            self.conv_weight.to(projected.dtype),  # which autocast makes another than the weight's
            activation="silu",
            initial_state=None if state is None else state.inputs,
            return_state=True,
            cu_seqlens=cu_seqlens,
        )
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        output, memory = F.delta_rule(
            query.unflatten(-1, (self.num_key_heads, -1)),
            key.unflatten(-1, (self.num_key_heads, -1)),
            value.unflatten(-1, (self.num_heads, -1)),
            self.beta_proj(x).sigmoid(),
            gate=-self.log_rate.float().exp()
            * nn.functional.softplus(self.gate_proj(x).float() + self.gate_bias.float()),
            normalize_qk=True,
            initial_state=None if state is None else state.memory,
            return_state=True,
            cu_seqlens=cu_seqlens,
        )
        normed = F.rms_norm(output, self.norm_weight, self.norm_eps).flatten(-2)
        result = self.out_proj(F.swiglu(self.g_proj(x), normed))
        return (result, DeltaNetState(inputs, memory)) if return_state else result

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, num_key_heads={self.num_key_heads}"
