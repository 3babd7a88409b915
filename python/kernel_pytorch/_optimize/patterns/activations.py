"""GELU, SiLU and the others, as modules: recognised by their values on a grid, whatever they are called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...functional import activation, softmax
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from .context import Context, single_input, undisturbed, why_not_plain
from .norms import first_name

NAME = "activation"
KINDS = ("gelu", "gelu_tanh", "silu", "relu", "relu_squared", "sigmoid", "tanh")


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    if x is None or len(call.tensors()) != 1 or any(True for _ in module.children()):
        return None
    if any(True for _ in module.parameters()) or isinstance(module, (nn.Dropout, nn.Identity)) or x.dim() == 0:
        return None
    if type(module) is nn.Softmax and module.dim in (-1, x.dim() - 1):
        forward = mark(single_input(lambda self, value: softmax(value), "input", nn.Softmax.forward))
        return Proposal(
            "softmax", path, module, "nn.Softmax", [Way("kernel_pytorch softmax", lambda: SetForward(module, forward))],
            pointwise=True,
        )  # fmt: skip
    kind = kind_of(module)
    if kind is None:
        return None
    reason = why_not_plain("", module)
    if reason or getattr(module, "inplace", False):
        return Refusal(path, NAME, reason or "it writes into its input (inplace=True)")
    context.activations[module] = kind
    forward = mark(single_input(lambda self, value: activation(value, kind), first_name(module), type(module).forward))
    return Proposal(
        NAME,
        path,
        module,
        f"{type(module).__name__} ({kind})",
        [Way(f"kernel_pytorch {kind}", lambda: SetForward(module, forward))],
        pointwise=True,
    )


def kind_of(function: object) -> str | None:
    """Which activation a module or a function is, by its values; None where it is none of ours."""
    if not callable(function):
        return None
    with undisturbed():
        grid = torch.linspace(-8, 8, 1025)
        try:
            values = function(grid.clone())
        except Exception:  # whatever it is, it is no activation
            return None
        if not isinstance(values, Tensor) or values.shape != grid.shape or values.dtype is not grid.dtype:
            return None
        for kind in KINDS:
            if (activation(grid, kind) - values).abs().max().item() <= 2e-6:
                return kind
    return None
