"""Optimizers on the project's kernels: torch.optim's interface and state_dict, one launch for a list of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from ._ops.adamw import adamw_, reduce_norm

__all__ = ["AdamW", "clip_grad_norm_"]

_SMALL = (torch.bfloat16, torch.float16)


class AdamW(torch.optim.Optimizer):
    """AdamW with torch.optim.AdamW's arguments and state_dict (each loads the other's), for dense gradients.

    A step is one kernel launch for up to 400 parameters of a group that share device and type. It can be captured in a
    CUDA graph as it is, with no `capturable`: step counts live on the parameters' device (a learning rate that changes
    between replays must be a tensor, as in torch). With torch.amp.GradScaler, gradients are unscaled and steps with
    infinities skipped inside the kernel.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.AdamW.
        foreach, fused, capturable: accepted for torch's sake; there is one implementation.
        differentiable: must be False.
        state_dtype: type of both averages: torch.float32 (usual), torch.bfloat16, or None for the parameter's own, as
            torch does. Averages of fp64 parameters are fp64.
        master_weights: keeps an fp32 copy of bf16 and fp16 parameters, in the state as "master", and updates that.
        stochastic_rounding: rounds bf16 parameters and bf16 averages up or down at random, so that the expectation is
            exact and updates smaller than half a unit are not lost; instead of master weights, at no memory.
        max_grad_norm: clips the L2 norm of all gradients to this, inside the step: gradients themselves are not
            changed. `grad_norm` holds the norm before clipping, unscaled, after each step.
        seed: of the stochastic rounding; None draws one from torch's generator. The bits depend on the seed and the
            step count alone, so that a run continued from a state_dict repeats them.
    """

    _step_supports_amp_scaling = True
    grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = torch.float32,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        seed: int | None = None,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"AdamW: lr is a tensor of {lr.numel()} elements; it must have one")
        _check_range("lr", lr if not isinstance(lr, Tensor) else 0.0, 0.0, float("inf"))
        _check_range("betas[0]", betas[0], 0.0, 1.0)
        _check_range("betas[1]", betas[1], 0.0, 1.0)
        _check_range("eps", eps, 0.0, float("inf"))
        _check_range("weight_decay", weight_decay, 0.0, float("inf"))
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"AdamW: max_grad_norm is {max_grad_norm}; it must be positive, or None")
        if differentiable:
            raise ValueError("AdamW: differentiable=True is not supported; use torch.optim.AdamW for it")
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"AdamW: state_dtype is {state_dtype}; it must be torch.float32, torch.bfloat16 or None")
        if seed is None:
            seed = int(torch.randint(0, 2**62, ())) if stochastic_rounding else 0
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=True if fused is None and not foreach else fused,  # steps are where torch's fused=True expects them
            decoupled_weight_decay=True,
            state_dtype=state_dtype,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            max_grad_norm=max_grad_norm,
        )
        super().__init__(params, defaults)
        self._scalars: dict[Any, Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._scalars = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this class' or torch.optim.AdamW's state. Averages are converted to each group's state_dtype."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for name, value in self.defaults.items():  # what torch's groups do not have
                group.setdefault(name, value)
            group["decoupled_weight_decay"] = True
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                # From the original: the base class converts every tensor to the parameter's type, masters included.
                for name, value in state_dict["state"].get(index, {}).items():
                    self.state[parameter][name] = self._converted(name, value, parameter, group)

    @property
    def max_grad_norm(self) -> float | None:
        return self.defaults["max_grad_norm"]  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure`, where given, is called first with gradients enabled, and its result returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        total_norm = self._total_norm() if self.max_grad_norm is not None else None
        if total_norm is not None:
            self.grad_norm = total_norm if grad_scale is None else total_norm / grad_scale.to(total_norm.device)
        for number, group in enumerate(self.param_groups):
            for place, batch in enumerate(self._batches(group)):
                self._step_batch(group, batch, number * 64 + place, grad_scale, found_inf, total_norm)
        return loss

    def _total_norm(self) -> Tensor | None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return _norm_of(gradients) if gradients else None

    def _batches(self, group: dict[str, Any]) -> Iterable[list[Tensor]]:
        """Parameters with a gradient, those of one device and type together."""
        batches: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    "AdamW: a gradient is sparse; use a dense one (sparse=False) or torch.optim.SparseAdam"
                )
            batches.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return batches.values()

    def _step_batch(
        self,
        group: dict[str, Any],
        batch: list[Tensor],
        number: int,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        total_norm: Tensor | None,
    ) -> None:
        device, dtype = batch[0].device, batch[0].dtype
        states = [self._state_of(parameter, group) for parameter in batch]
        has_master = group["master_weights"] and dtype in _SMALL
        seed = self._seed(group, number, states[0]["step"]) if _draws(group, dtype) else None
        lr, lr_tensor = self._rate(group["lr"], device)
        adamw_(
            batch,
            [_laid_out_like(parameter, cast(Tensor, parameter.grad)) for parameter in batch],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["master"] for state in states] if has_master else [],
            [state["step"] for state in states],
            lr_tensor,
            _scalar_on(grad_scale, device),
            _scalar_on(found_inf, device),
            _scalar_on(total_norm, device),
            seed,
            lr,
            float(group["betas"][0]),
            float(group["betas"][1]),
            group["eps"],
            group["weight_decay"],
            self.max_grad_norm or 0.0,
            group["maximize"],
        )

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if "step" not in state:
            if not parameter.is_floating_point():
                raise RuntimeError(f"AdamW: a parameter is {parameter.dtype}; take its real view (torch.view_as_real)")
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=_state_dtype(parameter, group))
        elif not (isinstance(state["step"], Tensor) and state["step"].device == parameter.device):
            state["step"] = self._converted("step", state["step"], parameter, group)  # put there by someone else
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter, dtype=_state_dtype(parameter, group))
        if group["master_weights"] and parameter.dtype in _SMALL and "master" not in state:
            state["master"] = parameter.to(torch.float32, memory_format=torch.preserve_format)
        return state  # type: ignore[no-any-return]

    @staticmethod
    def _converted(name: str, value: Any, parameter: Tensor, group: dict[str, Any]) -> Any:
        """A value of a loaded state as the kernel wants it, and a copy: no other tensor is written into."""
        if name == "step":  # torch keeps it on the CPU without fused or capturable, and once as a number
            step = value if isinstance(value, Tensor) else torch.tensor(float(value))
            return step.detach().to(parameter.device, torch.float32, copy=True)
        if not isinstance(value, Tensor):
            return value
        dtype = torch.float32 if name == "master" else _state_dtype(parameter, group)
        return torch.empty_like(parameter, dtype=dtype).copy_(value.detach())

    def _seed(self, group: dict[str, Any], number: int, step: Tensor) -> Tensor:
        """(seed, offset) on the device: the offset is the step count, so that a replayed graph draws new bits."""
        key = (number, step.device, group["seed"])
        seed = self._scalars.get(key)
        if seed is None:
            seed = self._scalars[key] = torch.tensor([group["seed"] + number, 0], device=step.device)
        seed[1:].copy_(step.view(1))
        return seed

    @staticmethod
    def _rate(lr: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
        if not isinstance(lr, Tensor):
            return lr, None
        if lr.device.type == "cpu":
            return float(lr), None
        return 0.0, lr.to(device, torch.float32).view(())


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales gradients in place so that the L2 norm of all of them is at most max_norm; returns the norm before.

    As torch.nn.utils.clip_grad_norm_ with norm_type=2; nothing waits for the device unless error_if_nonfinite.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = _norm_of(gradients)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {total.item()}; it cannot be clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient.detach())
    for device, some in by_device.items():
        torch._foreach_mul_(some, factor.to(device))
    return total


def _norm_of(gradients: list[Tensor]) -> Tensor:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    norms = [reduce_norm(some) for some in by_device.values()]
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def _state_dtype(parameter: Tensor, group: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype | None = group["state_dtype"]
    return parameter.dtype if dtype is None or parameter.dtype is torch.float64 else dtype


def _draws(group: dict[str, Any], dtype: torch.dtype) -> bool:
    is_bf16 = dtype is torch.bfloat16 or (group["state_dtype"] is torch.bfloat16 and dtype is torch.float32)
    return bool(group["stochastic_rounding"]) and is_bf16


def _laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _scalar_on(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else value.to(device, torch.float32).view(())


def _check_range(name: str, value: float, least: float, limit: float) -> None:
    if not least <= value < limit:
        raise ValueError(f"AdamW: {name} is {value}; it must be at least {least:g} and below {limit:g}")
