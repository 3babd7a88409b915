"""What the optimizers share: a step over lists of parameters, with clipping and the loss scale folded in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from .._ops.optimizer_step import optimizer_step_
from . import formats
from .norms import norm_of
from .shards import is_sharded, local, locals_of

_FORM = ("state", "state_dtype", "master_weights", "offload")  # a group's own, whatever is loaded


class ListOptimizer(torch.optim.Optimizer):
    """A step is one kernel launch for the parameters of a group that share device, type and format of their states.

    A class says what a parameter's state is (`_state_of`), how a list of parameters is stepped (`_step_batch`) and how
    a loaded state becomes its own (`_loaded`).
    """

    _step_supports_amp_scaling = True
    grad_norm: Tensor | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        name = type(self).__name__
        lr, max_grad_norm = defaults["lr"], defaults["max_grad_norm"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"{name}: lr is a tensor of {lr.numel()} elements; it must have one")
        check_range(name, "lr", lr if not isinstance(lr, Tensor) else 0.0, 0.0, float("inf"))
        check_range(name, "weight_decay", defaults["weight_decay"], 0.0, float("inf"))
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"{name}: max_grad_norm is {max_grad_norm}; it must be positive, or None")
        if defaults["differentiable"]:
            raise ValueError(f"{name}: differentiable=True is not supported; use torch.optim.{name} for it")
        formats.check_state(name, defaults["state"])
        super().__init__(params, defaults)
        self._scalars: dict[Any, Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._scalars = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this class' or torch's state. States are converted to each group's format, exactly where it has it."""
        own_forms = [{name: group[name] for name in _FORM if name in group} for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})  # the base class would convert codes and move all states
        for group, saved, own in zip(self.param_groups, state_dict["param_groups"], own_forms, strict=True):
            for name, value in self.defaults.items():  # what torch's groups do not have
                group.setdefault(name, value)
            group.update(own)
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                if index in state_dict["state"]:
                    entry = state_dict["state"][index]
                    self.state[parameter] = self._loaded(entry, parameter, group, saved.get("state", "fp32"))

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
                self._step_batch(group, batch, number * 64 + place, (grad_scale, found_inf, total_norm))
        self._join()
        return loss

    def _join(self) -> None:
        """Makes the caller's stream wait for steps that were taken on others."""

    def _total_norm(self) -> Tensor | None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return norm_of(gradients) if gradients else None

    def _batches(self, group: dict[str, Any]) -> Iterable[list[Tensor]]:
        """Parameters with a gradient, those of one device, type and format together."""
        batches: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__}: a gradient is sparse; use a dense one (sparse=False) or "
                    "torch.optim.SparseAdam"
                )
            form = formats.format_of(parameter, group["state"])
            batches.setdefault((parameter.device, parameter.dtype, form), []).append(parameter)
        return batches.values()

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _step_batch(
        self, group: dict[str, Any], batch: list[Tensor], number: int, signals: tuple[Tensor | None, ...]
    ) -> None:
        raise NotImplementedError

    def _loaded(
        self, entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], saved_state: str
    ) -> dict[str, Any]:
        raise NotImplementedError

    def _call(
        self,
        rule: str,
        group: dict[str, Any],
        batch: list[Tensor],
        states: list[dict[str, Any]] | dict[str, list[Tensor]],
        names: tuple[str, ...],
        signals: tuple[Tensor | None, ...],
        *,
        gradients: list[Tensor] | None = None,
        form: str | None = None,
        betas: tuple[float, float],
        eps: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        seed: Tensor | None = None,
    ) -> None:
        """The core's step by this rule; `states` by parameter, or lists by name; `names` of the first and the second.

        `gradients` and `form`, where given, are for parts of parameters, which have no gradients of their own.
        """
        device = batch[0].device
        if form is None:
            form = formats.format_of(batch[0], group["state"])
        if gradients is None:
            gradients = [laid_out_like(parameter, cast(Tensor, parameter.grad)) for parameter in batch]

        def each(name: str, wanted: bool) -> list[Tensor]:
            if not wanted:
                return []
            return states[name] if isinstance(states, dict) else [local(state[name]) for state in states]

        first, second = (*names, "", "")[:2]
        lr, lr_tensor = rate_on(group["lr"], device)
        grad_scale, found_inf, total_norm = (scalar_on(signal, device) for signal in signals)
        optimizer_step_(
            locals_of(batch),
            locals_of(gradients),
            each("correction", has_correction(batch[0], group)),
            each("master", has_master(batch[0], group)),
            each(first, bool(first)),
            each(second, bool(second)),
            each("max_exp_avg_sq", bool(group.get("amsgrad"))),
            each(f"{first}_scale", bool(first) and form != "fp32"),
            each(f"{second}_scale", bool(second) and form != "fp32"),
            each("step", True),
            lr_tensor,
            grad_scale,
            found_inf,
            total_norm,
            seed,
            rule,
            formats.STORAGE[form],
            lr,
            float(betas[0]),
            float(betas[1]),
            eps,
            group["weight_decay"],
            dampening,
            self.max_grad_norm or 0.0,
            nesterov,
            group["maximize"],
        )


def has_correction(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter has 8 more bits in its state."""
    return group["state"] == "compact" and parameter.dtype is torch.bfloat16


def has_master(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter has an fp32 copy in its state."""
    return bool(group.get("master_weights")) and parameter.dtype in (torch.bfloat16, torch.float16)


def make_states(
    state: dict[str, Any], parameter: Tensor, group: dict[str, Any], owner: str, names: tuple[str, ...]
) -> None:
    """A step count of 0 and zeros for `names`, in the group's format."""
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise RuntimeError(
            f'{owner}: a parameter is {parameter.dtype}; with state="{group["state"]}" it must be fp32, bf16 or fp16'
        )
    if group["state"] != "fp32" and is_sharded(parameter):
        raise RuntimeError(
            f'{owner}: a parameter is a DTensor; state="{group["state"]}" has scales for groups of elements, which '
            'checkpoints of sharded states cannot hold; take state="fp32"'
        )
    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    for name in names:
        formats.make_state(state, parameter, name, formats.format_of(parameter, group["state"]))
    if has_correction(parameter, group):
        state["correction"] = formats.make_correction(parameter)


def converted_states(
    entry: dict[str, Any], parameter: Tensor, group: dict[str, Any], saved_state: str, names: tuple[str, ...]
) -> dict[str, Any]:
    """A loaded state in the group's format, as copies: no other tensor is written into.

    `entry` is ours of any format, torch's (fp32), or bitsandbytes' (state1, absmax1, ...).
    """
    entry = _with_our_names(entry, names)
    form = formats.format_of(parameter, group["state"])
    state: dict[str, Any] = {"step": converted_step(entry["step"], parameter)} if "step" in entry else {}
    for name in names:
        value = entry.get(name)
        if value is None:
            continue
        value = value.detach().to(parameter.device)
        scale = entry.get(f"{name}_scale")
        is_square = name.endswith("_sq")
        if scale is not None:
            scale = scale.detach().to(parameter.device, torch.float32, copy=True)
            if form == saved_state and value.stride() == parameter.stride():
                state[name], state[f"{name}_scale"] = value.clone(), scale
                continue
            if scale.numel() != -(-value.numel() // formats.GROUP[saved_state]):
                raise ValueError(
                    f"{name}: {value.numel()} codes have {scale.numel()} scales; state={saved_state!r} has one for "
                    f"{formats.GROUP[saved_state]} elements"
                )
            value = formats.decode(value, scale, saved_state, is_square)
        value = torch.empty_like(parameter, dtype=torch.float32).copy_(value)
        if form == "fp32":
            state[name] = value
        else:
            state[name], state[f"{name}_scale"] = formats.encode(value, form, is_square)
    if has_correction(parameter, group):
        if "correction" in entry:
            moved = entry["correction"].detach().to(parameter.device)
            state["correction"] = torch.empty_like(parameter, dtype=torch.int8).copy_(moved)
        else:
            state["correction"] = formats.make_correction(parameter, entry.get("master"))
    return state


def _with_our_names(entry: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    if "state1" not in entry:
        return entry
    ours = {"step": entry.get("step", 0)}
    for name, theirs in zip(names, ("1", "2"), strict=False):
        codes = entry[f"state{theirs}"]
        ours[name] = codes.view(torch.int8) if codes.dtype is torch.uint8 else codes
        if codes.dtype is torch.uint8:
            ours[f"{name}_scale"] = entry[f"absmax{theirs}"]
    return ours


def converted_step(value: Any, parameter: Tensor) -> Tensor:
    """A step count on the device: torch keeps it on the CPU without fused or capturable, and once as a number."""
    step = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return step.detach().to(parameter.device, torch.float32, copy=True)


def rate_on(lr: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    if not isinstance(lr, Tensor):
        return lr, None
    if lr.device.type == "cpu":
        return float(lr), None
    return 0.0, lr.to(device, torch.float32).view(())


def laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def scalar_on(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else value.to(device, torch.float32).view(())


def check_range(owner: str, name: str, value: float, least: float, limit: float) -> None:
    if not least <= value < limit:
        raise ValueError(f"{owner}: {name} is {value}; it must be at least {least:g} and below {limit:g}")
