"""Lion (Chen et al., 2023)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .steps import ListOptimizer, check_range, converted_states, make_states


class Lion(ListOptimizer):
    """The sign of a momentum as the update: half of AdamW's states.

        update    = sign(exp_avg + (1 - beta1) * (gradient - exp_avg))
        parameter = parameter * (1 - lr * weight_decay) - lr * update
        exp_avg   = exp_avg + (1 - beta2) * (gradient - exp_avg)

    Args:
        params, lr, betas, weight_decay: as usual; lr is three to ten times smaller than AdamW's, weight_decay larger.
        maximize: ascends.
        state: the format of exp_avg and of bf16 weights, as in `AdamW`.
        max_grad_norm: clips the L2 norm of all gradients inside the step, as in `AdamW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: str = "fp32",
        max_grad_norm: float | None = None,
    ) -> None:
        check_range("Lion", "betas[0]", betas[0], 0.0, 1.0)
        check_range("Lion", "betas[1]", betas[1], 0.0, 1.0)
        defaults = dict(
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            maximize=maximize,
            differentiable=False,
            state=state,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if "step" not in state:
            make_states(state, parameter, group, "Lion", ("exp_avg",))
        return state  # type: ignore[no-any-return]

    def _step_batch(
        self, group: dict[str, Any], batch: list[Tensor], number: int, signals: tuple[Tensor | None, ...]
    ) -> None:
        states = [self._state_of(parameter, group) for parameter in batch]
        self._call("lion", group, batch, states, ("exp_avg",), signals, betas=group["betas"])

    def _loaded(
        self, entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], saved_state: str
    ) -> dict[str, Any]:
        return converted_states(entry, parameter, group, saved_state, ("exp_avg",))
