"""Mixtures of experts: layers, routers and their losses on grouped products."""

from __future__ import annotations

from .balance import LoadBalancer
from .config import MoEConfig
from .layers import GLaMStyleMoE, MoELayer, SwitchTransformerMoE, create_moe, create_moe_layer
from .parallel import expert_parallel_mlp
from .routers import HashRouter, LearnedRouter, Router, SwitchRouter, TopKRouter, create_router

__all__ = [
    "GLaMStyleMoE",
    "HashRouter",
    "LearnedRouter",
    "LoadBalancer",
    "MoEConfig",
    "MoELayer",
    "Router",
    "SwitchRouter",
    "SwitchTransformerMoE",
    "TopKRouter",
    "create_moe",
    "create_moe_layer",
    "create_router",
    "expert_parallel_mlp",
]
