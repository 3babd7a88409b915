"""The numbers of a mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class MoEConfig:
    """What a MoELayer is made of.

    Attributes:
        num_experts: up to 1024.
        top_k: experts of a token, up to 16.
        activation: of the experts, as in functional.moe_mlp.
        use_bias: whether experts have biases.
        score: "softmax" over the experts, or "sigmoid" of each.
        groups, group_k: as in functional.route.
        normalize_router_probs: whether a token's weights sum to `scale`.
        scale: of the weights.
        selection_bias: a buffer that is added to scores for the choice alone, moved by `update_selection_bias`.
        capacity_factor: an expert takes so many times its even share of the tokens, and drops the rest; None drops
            nothing. The share counts all top_k experts of a token.
        min_capacity: but at least so many.
        router_jitter: in training the router's input is multiplied by numbers within so much of 1.
        expert_dropout: of the layer's output, in training.
        load_balance_loss_weight, router_z_loss_weight: of the losses.
        shared_hidden: the inner size of an expert that every token has; 0: none.
    """

    num_experts: int = 8
    top_k: int = 2
    activation: str = "swiglu"
    use_bias: bool = False
    score: str = "softmax"
    groups: int | None = None
    group_k: int | None = None
    normalize_router_probs: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    capacity_factor: float | None = None
    min_capacity: int = 4
    router_jitter: float = 0.0
    expert_dropout: float = 0.0
    load_balance_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001
    shared_hidden: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= min(self.num_experts, 16):
            raise ValueError(
                f"MoEConfig: top_k is {self.top_k} of {self.num_experts} experts; it must be from 1 to their number, "
                "at most 16"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"MoEConfig: capacity_factor is {self.capacity_factor}; it must be positive, or None")
        if not 0 <= self.router_jitter < 1:
            raise ValueError(f"MoEConfig: router_jitter is {self.router_jitter}; it must be in [0, 1)")

    def capacity(self, tokens: int) -> int | None:
        """Of an expert, with so many tokens; None: as many as there are."""
        if self.capacity_factor is None:
            return None
        return max(self.min_capacity, math.ceil(tokens * self.top_k * self.capacity_factor / self.num_experts))
