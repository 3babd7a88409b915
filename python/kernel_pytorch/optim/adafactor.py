"""Adafactor (Shazeer and Stern, 2018)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .shards import is_sharded
from .steps import ListOptimizer, check_range, converted_states, converted_step, make_states, scalar_on

_AVERAGES = ("row_var", "col_var", "variance")  # torch.optim.Adafactor's names


class Adafactor(ListOptimizer):
    """The average of squares as the product of a column and a row: a matrix has next to no states.

        row_var, col_var = averages of the mean squares of rows and of columns, of weight step^beta2_decay
        update    = gradient / sqrt(row_var col_var / mean(row_var)), a vector's by its own average of squares
        parameter = parameter * (1 - lr * weight_decay)
                    - min(lr, 1 / sqrt(step)) * max(eps[1], rms(parameter)) * update / max(1, rms(update) / d)

    As torch.optim.Adafactor, whose state_dict it takes and gives; but nothing waits for the device, where torch reads
    three numbers of every parameter. Estimates are torch's ops, in fp32; all parameters of a kind are then changed in
    one launch.

    Args:
        params, lr, beta2_decay, eps, d, weight_decay, maximize: as torch's; eps[0] of None is the type's own.
        foreach: accepted for torch's sake; there is one implementation.
        state: "fp32", or "compact": bf16 weights have 8 more bits, as in `AdamW`.
        max_grad_norm: clips the L2 norm of all gradients inside the step, as in `AdamW`.
    """

    _step_supports_amp_scaling = False  # a GradScaler divides gradients and leaves steps with infinities out itself

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        state: str = "fp32",
        max_grad_norm: float | None = None,
    ) -> None:
        check_range("Adafactor", "-beta2_decay", -beta2_decay, 0.0, float("inf"))
        check_range("Adafactor", "eps[0]", eps[0] or 0.0, 0.0, float("inf"))
        check_range("Adafactor", "eps[1]", eps[1], 0.0, float("inf"))
        check_range("Adafactor", "d", d, 1.0, float("inf"))
        if state == "8bit":
            raise ValueError('Adafactor: state is "8bit", and its averages are few numbers; take "fp32" or "compact"')
        defaults = dict(
            lr=lr,
            beta2_decay=beta2_decay,
            eps=eps,
            d=d,
            weight_decay=weight_decay,
            foreach=foreach,
            maximize=maximize,
            differentiable=False,
            state=state,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if "step" not in state:
            if is_sharded(parameter):
                raise RuntimeError("Adafactor: a parameter is a DTensor, of which a rank has only a part; it needs all")
            make_states(state, parameter, group, "Adafactor", ())
            for name, shape in _shapes(parameter).items():
                state[name] = torch.zeros(shape, device=parameter.device)
        return state  # type: ignore[no-any-return]

    def _step_batch(
        self, group: dict[str, Any], batch: list[Tensor], number: int, signals: tuple[Tensor | None, ...]
    ) -> None:
        states = [self._state_of(parameter, group) for parameter in batch]
        total_norm = scalar_on(signals[2], batch[0].device)
        shared = None if total_norm is None else (cast(float, self.max_grad_norm) / (total_norm + 1e-6)).clamp(max=1.0)
        changes = [_change(p, state, group, shared) for p, state in zip(batch, states, strict=True)]
        # Rates are in the changes: what is left is to subtract them, with whatever bits the weights have.
        plain = {**group, "lr": 1.0, "weight_decay": 0.0, "maximize": False}
        self._call(
            "sgd", plain, batch, states, (), (None, None, None), gradients=changes, form="fp32", betas=(0.0, 0.0)
        )

    def _loaded(
        self, entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], saved_state: str
    ) -> dict[str, Any]:
        state = converted_states(entry, parameter, group, saved_state, ())
        if "step" in entry:
            state["step"] = converted_step(entry["step"], parameter)
        for name in _AVERAGES:
            if entry.get(name) is not None:
                state[name] = entry[name].detach().to(parameter.device, torch.float32, copy=True)
        return state


def _shapes(parameter: Tensor) -> dict[str, tuple[int, ...]]:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def _change(parameter: Tensor, state: dict[str, Any], group: dict[str, Any], clip: Tensor | None) -> Tensor:
    """What is subtracted from the parameter, of its type and layout."""
    step, size = state["step"] + 1, max(parameter.numel(), 1) ** 0.5
    gradient = cast(Tensor, parameter.grad).float()
    if group["maximize"] or clip is not None:
        gradient = gradient * (-1.0 if group["maximize"] else 1.0) * (1.0 if clip is None else clip)
    least = group["eps"][0] if group["eps"][0] is not None else torch.finfo(parameter.dtype).eps
    weight = step ** group["beta2_decay"]
    if parameter.dim() > 1:
        for name, dim in (("row_var", -1), ("col_var", -2)):
            mean = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square_().div_(gradient.shape[dim])
            state[name].lerp_(mean, weight)
        estimate = state["row_var"] @ state["col_var"]
        estimate.div_(state["row_var"].mean(-2, keepdim=True).clamp_(min=least))
    else:
        state["variance"].lerp_(gradient.square(), weight)
        estimate = state["variance"].clone()
    update = estimate.clamp_(min=least * least).rsqrt_().mul_(gradient)
    lr = scalar_on(group["lr"], parameter.device) if isinstance(group["lr"], Tensor) else group["lr"]
    length = (torch.linalg.vector_norm(parameter.float()) / size).clamp(min=group["eps"][1])
    excess = (torch.linalg.vector_norm(update) / (size * group["d"])).clamp(min=1.0)
    update.mul_(step.rsqrt().clamp(max=lr) * length / excess)
    if group["weight_decay"]:
        update += parameter.float() * (lr * group["weight_decay"])
    return torch.empty_like(parameter).copy_(update)
