"""Routers: a linear layer whose outputs choose the experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import Routing, route
from .config import MoEConfig


class Router(nn.Module):
    """Logits of the experts in fp32, and the Routing that they make.

    Args:
        hidden_size: of the tokens.
        config: how to choose.
    """

    weight: Tensor
    selection_bias: Tensor | None

    def __init__(self, hidden_size: int, config: MoEConfig, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.zeros(config.num_experts, device=device) if config.selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def logits(self, x: Tensor) -> Tensor:
        """[..., experts] in fp32: rounded to 16 bits, close experts would change places."""
        x = x.float()
        if self.training and self.config.router_jitter:
            jitter = self.config.router_jitter
            x = x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x, self.weight.float())

    def forward(self, x: Tensor) -> Routing:
        config = self.config
        return route(
            self.logits(x),
            config.top_k,
            score=config.score,
            bias=self.selection_bias,
            groups=config.groups,
            group_k=config.group_k,
            renormalize=config.normalize_router_probs,
            scale=config.scale,
            capacity=config.capacity(x.numel() // x.shape[-1]),
        )

    @torch.no_grad()
    def update_selection_bias(self, counts: Tensor, rate: float = 1e-3) -> None:
        """Balance without a loss: experts that were chosen less than the mean become easier to choose.

        Args:
            counts: pairs that chose each expert, of all devices (Routing.counts, reduced).
            rate: of one step.
        """
        if self.selection_bias is None:
            raise RuntimeError("update_selection_bias: the router has no bias; make it with selection_bias=True")
        self.selection_bias += rate * torch.sign(counts.float().mean() - counts.float())

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.config.num_experts} experts, top {self.config.top_k}"


class TopKRouter(Router):
    """A Router that is made of numbers instead of a MoEConfig, whose other fields are options."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, MoEConfig(num_experts, top_k, **options), device, dtype)


class SwitchRouter(TopKRouter):
    """One expert per token, weighted by its probability, as in the Switch Transformer: jitter, and a capacity."""

    def __init__(self, hidden_size: int, num_experts: int, **options: Any) -> None:
        usual = dict(capacity_factor=1.25, router_jitter=0.01, normalize_router_probs=False)
        super().__init__(hidden_size, num_experts, 1, **{**usual, **options})


def create_router(kind: str, hidden_size: int, num_experts: int, top_k: int = 2, **options: Any) -> Router:
    """A router by name.

    Args:
        kind: "topk", "switch", or "sigmoid": sigmoid scores with a selection bias, as DeepSeek-V3's.
        hidden_size: of the tokens.
        num_experts: up to 1024.
        top_k: experts of a token.
        options: fields of MoEConfig.
    """
    if kind == "switch":
        return SwitchRouter(hidden_size, num_experts, **options)
    if kind == "sigmoid":
        options = {"score": "sigmoid", "selection_bias": True, **options}
    elif kind != "topk":
        raise ValueError(f'create_router: kind is "{kind}"; it is topk, switch or sigmoid')
    return TopKRouter(hidden_size, num_experts, top_k, **options)


def with_changes(config: MoEConfig, changes: dict[str, Any]) -> MoEConfig:
    """The config with these fields, whose names are checked."""
    known = {field.name for field in dataclasses.fields(MoEConfig)}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"a mixture of experts has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return dataclasses.replace(config, **changes)
