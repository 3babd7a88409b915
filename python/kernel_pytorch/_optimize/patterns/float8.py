"""FP8 for training, for layers of one input: it is rounded once, and their weights, laid one after the other in memory
(the parameters stay, see PackRows), are those of one FP8 layer. Of a gated MLP also what stands between the layers is
rounded where it is made: the norm before it, the activation, and the activation's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import _library
from ...precision import FP8Config, FP8LinearLayer, fp8_gated_mlp
from ..changes import Change, OfThisProcess, PackRows
from .context import Context, owners

KEY = "_kernel_pytorch_float8"


def config() -> FP8Config:
    """Scaled by what each tensor holds: a model that is optimized has no step to update scales in."""
    return FP8Config(scaling_strategy="current")


def why_not(context: Context, shapes: Sequence[tuple[int, int]], tokens: int) -> str | None:
    """Why FP8 would not pay for layers of (in, out) features, by its plan, or None."""
    for in_features, out_features in shapes:
        request = {
            "tokens": max(tokens, 1),
            "in_features": in_features,
            "out_features": out_features,
            "device": f"cuda:{context.device.index or 0}" if context.device.type == "cuda" else "cpu",
            "recipe": "current",
        }
        answer = _library.call("float8_plan", request=request)
        if not answer["pays"]:
            return str(answer["reason"])
    return None


def joined_shape(layers: list[Any]) -> tuple[int, int]:
    return layers[0].in_features, sum(layer.out_features for layer in layers)


def can_join(context: Context, layers: list[Any]) -> bool:
    """Whether the layers' weights can lie in one matrix: plain, alike, and not shared."""
    if any(type(layer) is not nn.Linear for layer in layers) or len({layer.bias is None for layer in layers}) > 1:
        return False
    kinds = {(layer.weight.shape[1], layer.weight.dtype, layer.weight.device) for layer in layers}
    return len(kinds) == 1 and all(
        layer.weight.is_contiguous() and len(owners(context.model, layer.weight)) == 1 for layer in layers
    )


class _Rows(torch.autograd.Function):
    """Parameters that lie in one matrix, as that matrix: each gets its rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, pack: PackRows, *parameters: Tensor) -> Tensor:
        assert pack.packed is not None
        ctx.sizes = [len(one) for one in parameters]
        return pack.packed.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *torch.split(grad, ctx.sizes)


def rows_of(pack: PackRows) -> Tensor:
    """The matrix that parameters lie in, differentiable by them."""
    return _Rows.apply(pack, *pack.tensors)  # type: ignore[no-untyped-call, no-any-return]


class JoinedLayer(FP8LinearLayer):
    """The FP8 layer of several layers' rows, on their parameters."""

    @classmethod
    def of(cls, layers: list[Any], packs: list[PackRows]) -> JoinedLayer:
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = joined_shape(layers)
        made.packs = packs
        made._add_state(config(), layers[0].weight.device)
        return made

    packs: list[PackRows]  # of the weights, and of the biases where there are any

    def holds(self) -> bool:
        return all(pack.holds() for pack in self.packs)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return rows_of(self.packs[0])

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        if len(self.packs) == 1:
            return None
        return rows_of(self.packs[1])


def packs_of(layers: list[Any]) -> list[PackRows]:
    """For the weights, and the biases where there are any: zeros stand for one that is missing."""
    packs = [PackRows([layer.weight for layer in layers])]
    like = next((layer.bias for layer in layers if layer.bias is not None), None)
    if like is None:
        return packs
    biases = [like.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return [*packs, PackRows(biases)]


def ready(layer: FP8LinearLayer, x: Tensor, training: bool) -> FP8LinearLayer:
    """The layer on x's device: a model may have moved, and state stored next to its modules does not move with it."""
    if layer.fp8_scale.device != x.device:
        layer.to(x.device)
    layer.training = training
    return layer


class GatedMlp(OfThisProcess):
    """The FP8 layers of a gated MLP, stored next to its module."""

    def __init__(self, gate_up: JoinedLayer, down: FP8LinearLayer, kind: str) -> None:
        self.gate_up, self.down, self.kind = gate_up, down, kind

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        gate_up, down = (ready(layer, x, module.training) for layer in (self.gate_up, self.down))
        return fp8_gated_mlp(x, gate_up, down, self.kind)  # type: ignore[no-any-return]

    def after_norm(self, module: nn.Module, x: Tensor, residual: Tensor, norm: Any, weights: Any) -> Tensor:
        """sum + mlp(norm(sum)) of the sum x + residual."""
        gate_up, down = (ready(layer, x, module.training) for layer in (self.gate_up, self.down))
        output, total = fp8_gated_mlp(
            x, gate_up, down, self.kind, norm_weight=norm.parameters(weights)[0], eps=norm.epsilon(x.dtype),
            residual=residual, weight_offset=norm.offset,
        )  # fmt: skip
        return output + total  # type: ignore[no-any-return]


def of_module(module: nn.Module) -> GatedMlp | None:
    """The module's FP8 form, where it is in force: a copied or moved model has weights of its own."""
    found: GatedMlp | None = module.__dict__.get(KEY)
    return found if found is not None and found.gate_up.holds() else None


class KeepMlp(Change):
    """Stores the FP8 layers next to a module whose gate and up lie in the packs."""

    def __init__(self, module: nn.Module, layers: list[Any], packs: list[PackRows], kind: str) -> None:
        self.module, self.layers, self.packs, self.kind = module, layers, packs, kind

    def apply(self) -> None:
        if KEY in self.module.__dict__:
            return
        gate_up = JoinedLayer.of(self.layers[:2], self.packs)
        down = FP8LinearLayer.from_linear(self.layers[2], config())
        down._parameters = self.layers[2]._parameters  # whatever becomes of them
        self.module.__dict__[KEY] = GatedMlp(gate_up, down, self.kind)

    def undo(self) -> None:
        self.module.__dict__.pop(KEY, None)
