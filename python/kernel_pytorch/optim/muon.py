"""Muon (Jordan, 2024): momentum made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from .._ops.matmul import matmul
from .steps import check_range


class Muon(torch.optim.Optimizer):
    """Muon with torch.optim.Muon's arguments and state_dict (each loads the other's), for the matrices of a model.

    The momentum of a matrix is made nearly orthogonal by Newton-Schulz steps, products of our GEMM in bf16. Matrices of
    one shape are taken together, in one batched product each. Embeddings, heads, norms and biases belong to another
    optimizer, `AdamW` mostly.

    Args:
        params: matrices only.
        lr, weight_decay, momentum, nesterov, eps, ns_steps: as torch.optim.Muon.
        ns_coefficients: of x, x^3 and x^5 in a step, which act on singular values.
        adjust_lr_fn: "original" (None is the same) multiplies lr by sqrt(max(1, rows / columns)), "match_rms_adamw"
            by 0.2 * sqrt(max(rows, columns)), for AdamW's rates.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        check_range("Muon", "lr", lr, 0.0, float("inf"))
        check_range("Muon", "weight_decay", weight_decay, 0.0, float("inf"))
        check_range("Muon", "momentum", momentum, 0.0, float("inf"))
        check_range("Muon", "ns_steps", ns_steps, 0, 100)
        if len(ns_coefficients) != 3:
            raise ValueError(f"Muon: ns_coefficients has {len(ns_coefficients)} numbers; it must have three")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f'Muon: adjust_lr_fn is "{adjust_lr_fn}"; it must be "original" or "match_rms_adamw"')
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(
                        f"Muon: a parameter has shape {list(parameter.shape)}; it takes matrices, give others to AdamW"
                    )
                if hasattr(parameter, "placements"):
                    raise ValueError("Muon: a parameter is a DTensor, of which a rank has only a part; it needs all")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure`, where given, is called first with gradients enabled, and its result returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("Muon: a gradient is sparse; use a dense one (sparse=False)")
                alike.setdefault((parameter.shape, parameter.device, parameter.dtype), []).append(parameter)
            for parameters in alike.values():
                self._step_alike(group, parameters)
        return loss

    def _step_alike(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Parameters of one shape, device and type."""
        gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
        momenta = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momenta.append(state["momentum_buffer"])
        momentum = group["momentum"]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        directions = torch._foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta
        updates = orthogonalized(
            torch.stack(list(directions)), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rows, columns = parameters[0].shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            adjusted = group["lr"] * 0.2 * math.sqrt(max(rows, columns))
        else:
            adjusted = group["lr"] * math.sqrt(max(1, rows / columns)) if columns else group["lr"]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, [update.to(parameters[0].dtype) for update in updates], alpha=-adjusted)


def orthogonalized(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Matrices [count, rows, columns] with singular values near 1, in bf16: `steps` Newton-Schulz steps
    x -> a x + (b x x^T + c (x x^T)^2) x from x over its norm."""
    a, b, c = coefficients
    x = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT  # the product of the short side with itself is the smaller one
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = matmul(x, x.mT)
        polynomial = torch.add(gram * b, matmul(gram, gram), alpha=c)
        x = torch.add(matmul(polynomial, x), x, alpha=a)
    return x.mT if is_tall else x
