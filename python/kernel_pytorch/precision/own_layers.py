"""FP8 forms of this library's layers that multiply by a weight themselves; those that hold an nn.Linear need none."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.activations import compute_gated_mlp_by
from ..core.attention import AttentionLayer
from ..core.linear import FusedLinearActivation, OptimizedLinear
from ..functional import activation as activate
from .config import FP8Config
from .fused import fp8_gated_mlp
from .linear import FP8LinearLayer

PROJECTION = "in_proj"  # the name under which AttentionLayer looks for its projection in FP8

compute_gated_mlp_by(FP8LinearLayer, fp8_gated_mlp)


class FP8LinearActivation(FP8LinearLayer):
    """FusedLinearActivation in FP8: bias, activation, residual and dropout are one pass over the product."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., in_features] -> [..., out_features]; the residual, of that shape, is added last."""
        plain: FusedLinearActivation = self.__dict__["_original"]
        dropout_p = plain.dropout if self.training else 0.0
        sums = self._multiply(x, self.weight, None)
        return activate(sums, plain._kind, bias=self.bias, residual=residual, dropout_p=dropout_p)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.__dict__['_original'].activation!r}"


class FP8PackedProjection(FP8LinearLayer):
    """The projection of query, key and value of an AttentionLayer, which keeps the parameters."""

    @classmethod
    def of(cls, owner: AttentionLayer, fp8_config: FP8Config) -> FP8PackedProjection:
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.out_features, layer.in_features = owner.in_proj_weight.shape
        layer.__dict__["_owner"] = owner  # not a submodule, which would be a circle
        layer._add_state(fp8_config, owner.in_proj_weight.device)
        layer.train(owner.training)
        return layer

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        owner: AttentionLayer = self.__dict__["_owner"]
        return owner.in_proj_weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        owner: AttentionLayer = self.__dict__["_owner"]
        return owner.in_proj_bias

    def forward(self, x: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        """x [..., in_features] -> [..., end - begin]: those rows of the weight."""
        bias = self.bias
        return self._multiply(x, self.weight[begin:end], None if bias is None else bias[begin:end])

    def to_linear(self) -> nn.Linear:
        raise TypeError("FP8PackedProjection is a part of its AttentionLayer; restore_from_fp8 takes it out of there")


# Layers with a forward of their own whose FP8 form is known, by their exact type.
FORMS: dict[type, type[FP8LinearLayer]] = {
    nn.Linear: FP8LinearLayer,
    OptimizedLinear: FP8LinearLayer,
    FusedLinearActivation: FP8LinearActivation,
}


def form_of(layer: nn.Linear) -> type[FP8LinearLayer] | None:
    """The class of a layer's FP8 form: by its type, or nn.Linear's where its forward is nn.Linear's. None: unknown."""
    known = FORMS.get(type(layer))
    if known is None and type(layer).forward is nn.Linear.forward:
        known = FP8LinearLayer
    return known


def add_projection(owner: Any, fp8_config: FP8Config) -> None:
    owner.add_module(PROJECTION, FP8PackedProjection.of(owner, fp8_config))


def remove_projection(layer: FP8PackedProjection) -> None:
    del layer.__dict__["_owner"]._modules[PROJECTION]
