"""Routers: a linear layer whose outputs choose the experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import Routing, route, route_chosen
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


class LearnedRouter(TopKRouter):
    """A TopKRouter whose logits are those of a small MLP.

    Args:
        hidden_size: of the tokens.
        num_experts: up to 1024.
        top_k: experts of a token.
        router_hidden: inner size of the MLP; None: the tokens'.
        options: fields of MoEConfig.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int = 2, *, router_hidden: int | None = None,
        device: Any = None, dtype: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        inner = router_hidden or hidden_size
        super().__init__(inner, num_experts, top_k, device=device, dtype=dtype, **options)
        self.inner = nn.Linear(hidden_size, inner, device=device, dtype=dtype)

    def logits(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            hidden = nn.functional.linear(x.float(), self.inner.weight.float(), self.inner.bias.float())
        return super().logits(nn.functional.gelu(hidden))


class HashRouter(nn.Module):
    """Experts by a hash of the token's id, as in hash layers: balanced over a vocabulary, nothing to learn.

    Args:
        num_experts: up to 1024.
        top_k: experts of a token, which are different ones and count alike.
        seed: another one gives another hash.
        capacity: as in `functional.route`.
    """

    def __init__(self, num_experts: int, top_k: int = 1, *, seed: int = 0, capacity: int | None = None) -> None:
        super().__init__()
        MoEConfig(num_experts, top_k)  # checks them
        self.num_experts, self.top_k, self.seed, self.capacity = num_experts, top_k, seed, capacity

    def forward(self, ids: Tensor) -> Routing:
        """The Routing of tokens with these ids, integers of any shape."""
        if ids.is_floating_point():
            raise ValueError(f"HashRouter: it takes ids of tokens, integers, and was given {ids.dtype}")
        mixed = _mix(ids.long() * 2 + 1 + 2 * self.seed * 0x9E3779B1)
        first = mixed % self.num_experts
        # Steps without a factor in common with the number of experts visit all of them.
        steps = [step for step in range(1, self.num_experts + 1) if math.gcd(step, self.num_experts) == 1]
        step = torch.tensor(steps, device=ids.device)[_mix(mixed) % len(steps)]
        chosen = (first[..., None] + step[..., None] * torch.arange(self.top_k, device=ids.device)) % self.num_experts
        weights = torch.full(chosen.shape, 1 / self.top_k, device=ids.device)
        return route_chosen(chosen, weights, self.num_experts, capacity=self.capacity)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, top {self.top_k}"


def _mix(x: Tensor) -> Tensor:
    """31 bits that depend on all bits of x: multiplications and shifts, on x's device."""
    for factor in (0x7FEB352D, 0x846CA68B):
        x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def create_router(kind: str, hidden_size: int, num_experts: int, top_k: int = 2, **options: Any) -> Router:
    """A router by name.

    Args:
        kind: "topk", "switch", "learned" (logits of an MLP), or "sigmoid": sigmoid scores with a selection bias, as
            DeepSeek-V3's.
        hidden_size: of the tokens.
        num_experts: up to 1024.
        top_k: experts of a token.
        options: fields of MoEConfig.
    """
    if kind == "switch":
        return SwitchRouter(hidden_size, num_experts, **options)
    if kind == "learned":
        return LearnedRouter(hidden_size, num_experts, top_k, **options)
    if kind == "sigmoid":
        options = {"score": "sigmoid", "selection_bias": True, **options}
    elif kind != "topk":
        raise ValueError(f'create_router: kind is "{kind}"; it is topk, switch, learned or sigmoid')
    return TopKRouter(hidden_size, num_experts, top_k, **options)


def with_changes(config: MoEConfig, changes: dict[str, Any]) -> MoEConfig:
    """The config with these fields, whose names are checked."""
    known = {field.name for field in dataclasses.fields(MoEConfig)}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"a mixture of experts has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return dataclasses.replace(config, **changes)
