"""Mixtures of experts: layers, routers and their losses on grouped products."""

from __future__ import annotations

from .config import MoEConfig
from .layers import MoELayer, create_moe, create_moe_layer
from .parallel import expert_parallel_mlp
from .routers import Router, SwitchRouter, TopKRouter, create_router

__all__ = [
    "MoEConfig",
    "MoELayer",
    "Router",
    "SwitchRouter",
    "TopKRouter",
    "create_moe",
    "create_moe_layer",
    "create_router",
    "expert_parallel_mlp",
]
