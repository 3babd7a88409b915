"""SGD with momentum, as torch.optim.SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .steps import ListOptimizer, check_range, converted_states, make_states

_MOMENTUM = "momentum_buffer"


class SGD(ListOptimizer):
    """SGD with torch.optim.SGD's arguments and state_dict (each loads the other's), for dense gradients.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as torch.optim.SGD.
        foreach, fused: accepted for torch's sake; there is one implementation.
        differentiable: must be False.
        state: the format of the momentum and of bf16 weights, as in `AdamW`. Without momentum it must be "fp32".
        max_grad_norm: clips the L2 norm of all gradients inside the step, as in `AdamW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state: str = "fp32",
        max_grad_norm: float | None = None,
    ) -> None:
        check_range("SGD", "momentum", momentum, 0.0, float("inf"))
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"SGD: nesterov needs momentum and no dampening; momentum is {momentum}, dampening {dampening}"
            )
        if state != "fp32" and momentum == 0:
            raise ValueError(f'SGD: state is "{state}" without momentum, which has no state; leave it out')
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            state=state,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        names = (_MOMENTUM,) if group["momentum"] else ()
        if "step" not in state or (names and _MOMENTUM not in state):
            make_states(state, parameter, group, "SGD", names)
        return state  # type: ignore[no-any-return]

    def _step_batch(
        self, group: dict[str, Any], batch: list[Tensor], number: int, signals: tuple[Tensor | None, ...]
    ) -> None:
        states = [self._state_of(parameter, group) for parameter in batch]
        names = (_MOMENTUM,) if group["momentum"] else ()
        options = dict(betas=(group["momentum"], 0.0), dampening=group["dampening"], nesterov=group["nesterov"])
        self._call("sgd", group, batch, states, names, signals, **options)

    def _loaded(
        self, entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], saved_state: str
    ) -> dict[str, Any]:
        """torch counts no steps: a momentum that is there has begun."""
        state = converted_states(entry, parameter, group, saved_state, (_MOMENTUM,))
        if _MOMENTUM in state and "step" not in state:
            state["step"] = torch.ones((), dtype=torch.float32, device=parameter.device)
        return state
