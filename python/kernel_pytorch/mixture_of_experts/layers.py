"""Layers of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from .._ops.grouped_matmul import activation_of, apply_activation
from ..functional import Routing, moe_mlp
from .config import MoEConfig
from .parallel import expert_parallel_mlp
from .routers import Router, with_changes

FEW_BITS = "_kernel_pytorch_few_bits"  # where optimize puts (gate_up, down) -> their codes

# What differs from MoEConfig's defaults.
_KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "switch": dict(
        top_k=1,
        activation="relu",
        use_bias=True,
        capacity_factor=1.25,
        router_jitter=0.01,
        normalize_router_probs=False,
    ),
    "glam": dict(top_k=2, activation="geglu", capacity_factor=2.0),
    "mixtral": dict(top_k=2, activation="swiglu"),
    "deepseek": dict(score="sigmoid", selection_bias=True, activation="swiglu"),
}


class MoELayer(nn.Module):
    """A feed-forward layer of experts: a router, their MLPs as grouped products, and an expert for all, if wanted.

    Args:
        d_model: size of the tokens.
        d_hidden: inner size of an expert; None: four times the tokens'.
        num_experts: up to 1024.
        top_k: experts of a token, up to 16.
        config: instead of the last two and of the options.
        group: a process group whose ranks share the experts, each with its own tokens; None: this process has all.
        parts: of `expert_parallel_mlp`, with a group.
        device, dtype: of the parameters.
        options: other fields of MoEConfig.

    The experts' weights are [experts, columns, size] and [experts, size, inner], as checkpoints have them; with a group
    of this rank's experts alone. A forward drops tokens only where a capacity_factor is given.
    """

    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        num_experts: int = 8,
        top_k: int = 2,
        *,
        config: MoEConfig | None = None,
        group: Any = None,
        parts: int = 1,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if config is None:
            config = with_changes(MoEConfig(num_experts, top_k), options)
        elif options:
            config = with_changes(config, options)
        self.config, self.group, self.parts = config, group, parts
        experts, inner = config.num_experts, d_hidden or 4 * d_model
        if group is not None:
            ranks = distributed.get_world_size(group)
            if experts % ranks:
                raise ValueError(f"MoELayer: {experts} experts are no multiple of the group's {ranks} ranks")
            experts //= ranks
        self.gated = activation_of("MoELayer", config.activation).form != "plain"
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        columns = 2 * inner if self.gated else inner
        self.router = Router(d_model, config, **factory)
        self.gate_up = nn.Parameter(torch.empty(experts, columns, d_model, **factory))
        self.down = nn.Parameter(torch.empty(experts, d_model, inner, **factory))
        for name, size in (("gate_up_bias", columns), ("down_bias", d_model)):
            self.register_parameter(
                name, nn.Parameter(torch.zeros(experts, size, **factory)) if config.use_bias else None
            )
        shared = config.shared_hidden
        self.shared_in = (
            nn.Linear(d_model, 2 * shared if self.gated else shared, bias=config.use_bias, **factory)
            if shared
            else None
        )
        self.shared_out = nn.Linear(shared, d_model, bias=config.use_bias, **factory) if shared else None
        self.dropout = nn.Dropout(config.expert_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up, std=self.gate_up.shape[-1] ** -0.5)
        nn.init.normal_(self.down, std=self.down.shape[-1] ** -0.5)

    def forward(self, x: Tensor, *, routing: Routing | None = None, return_losses: bool = False) -> Any:
        """The experts' output for x [..., d_model]; with return_losses also what `losses` makes of the routing, which
        is the router's unless another one is given (a HashRouter's)."""
        routing = self.router(x) if routing is None else routing
        tensors = (x, routing, *self.expert_weights())
        options: dict[str, Any] = dict(
            gate_up_bias=self.gate_up_bias, down_bias=self.down_bias, activation=self.config.activation, transposed=True
        )
        if self.group is None:
            output = moe_mlp(*tensors, **options)
        else:
            output = expert_parallel_mlp(*tensors, group=self.group, parts=self.parts, **options)
        if self.shared_in is not None and self.shared_out is not None:
            hidden = apply_activation(self.shared_in(x), activation_of("MoELayer", self.config.activation))
            output = output + self.shared_out(hidden)
        output = self.dropout(output)
        return (output, self.losses(routing)) if return_losses else output

    def expert_weights(self) -> tuple[Any, Any]:
        """gate_up and down as the products take them: the parameters, or their codes in few bits
        (precision.convert_model puts modules that keep codes in their places, optimize puts codes next to them)."""
        kept = self.__dict__.get(FEW_BITS)
        if kept is not None:
            return kept(self.gate_up, self.down)  # type: ignore[no-any-return]
        if not isinstance(self.gate_up, nn.Module):
            return self.gate_up, self.down
        if self.group is None:
            return self.gate_up.quantized_weight, self.down.quantized_weight
        return self.gate_up.dequantize(), self.down.dequantize()

    def losses(self, routing: Routing) -> dict[str, Tensor]:
        """Of a routing: load_balance_loss and router_z_loss with their weights, expert_utilization (the share of pairs
        that each expert was chosen by) and tokens_dropped (pairs)."""
        return {
            "load_balance_loss": self.config.load_balance_loss_weight * routing.aux_loss,
            "router_z_loss": self.config.router_z_loss_weight * routing.z_loss,
            "expert_utilization": routing.counts / routing.counts.sum().clamp(min=1),
            "tokens_dropped": routing.dropped,
        }

    def extra_repr(self) -> str:
        experts, _, size = self.gate_up.shape
        return f"{size}, {self.down.shape[-1]}, {experts} experts, top {self.config.top_k}, {self.config.activation}"


def create_moe_layer(
    moe_type: str, hidden_size: int, num_experts: int = 8, top_k: int | None = None, *, d_hidden: int | None = None,
    device: Any = None, dtype: Any = None, **options: Any,
) -> MoELayer:  # fmt: skip
    """A MoELayer by the name of the model that it is like.

    Args:
        moe_type: "standard", "switch" (one expert, a capacity, jitter), "glam" (two GEGLU experts, a capacity),
            "mixtral" (two SwiGLU experts) or "deepseek" (sigmoid scores, balance by a selection bias).
        hidden_size: of the tokens.
        num_experts: up to 1024.
        top_k: experts of a token; None: the kind's.
        d_hidden: inner size of an expert; None: four times the tokens'.
        device, dtype: of the parameters.
        options: fields of MoEConfig.
    """
    if moe_type not in _KINDS:
        raise ValueError(f'create_moe_layer: moe_type is "{moe_type}"; it is one of {", ".join(_KINDS)}')
    kind = {**_KINDS[moe_type], **options}
    if top_k is not None:
        kind["top_k"] = top_k
    config = with_changes(MoEConfig(num_experts, min(2, num_experts)), kind)
    return MoELayer(hidden_size, d_hidden, config=config, device=device, dtype=dtype)


create_moe = create_moe_layer


class SwitchTransformerMoE(MoELayer):
    """The layer of kind "switch": one ReLU expert per token, a capacity, jitter. Options as MoELayer's."""

    def __init__(self, d_model: int, d_hidden: int | None = None, num_experts: int = 8, **options: Any) -> None:
        super().__init__(d_model, d_hidden, num_experts, **{**_KINDS["switch"], **options})


class GLaMStyleMoE(MoELayer):
    """The layer of kind "glam": two GEGLU experts per token, a capacity. Options as MoELayer's."""

    def __init__(self, d_model: int, d_hidden: int | None = None, num_experts: int = 8, **options: Any) -> None:
        super().__init__(d_model, d_hidden, num_experts, **{**_KINDS["glam"], **options})
