"""Training in FP8: a loss and its gradients, then a step that is taken, or skipped after an overflow, and says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from .config import FP8Config, FP8Format
from .convert import convert_model_to_fp8, restore_from_fp8
from .losses import DifferentiatedLoss, default_loss
from .scales import fp8_layers, fp8_state_dict, load_fp8_state_dict, take_overflows, update_fp8_scales


class FP8TrainingEngine:
    """Trains a model whose linear layers compute in FP8.

        with FP8TrainingEngine(model, config) as trainer:
            loss = trainer.training_step(inputs, targets)
            stepped = trainer.optimizer_step(optimizer)

    The model is converted in place when training is set up (by `with`, or by the first step); its parameters stay the
    same objects, so an optimizer may be made before or after. restore_original_model puts the layers back.

    Args:
        loss_function: (outputs, targets) -> loss. None is cross entropy for integers, where rows of class -100 are
            left out (all of them: a loss of 0), else the mean squared error; of a Hugging Face output its logits.
    """

    def __init__(
        self,
        model: nn.Module,
        config: FP8Config | None = None,
        device: torch.device | str | None = None,
        *,
        loss_function: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        self.config = config or FP8Config()
        self.model = model if device is None else model.to(device)
        self.loss_function = loss_function or default_loss
        self.loss_scale = 1.0
        self._is_set_up = False
        self._steps_since_overflow = 0
        self._steps = self._overflows = self._scale_updates = self._losses = 0
        self._loss_sum: Tensor | None = None
        self._last_overflow_layers: list[str] = []

    def __repr__(self) -> str:
        layers = f"{len(fp8_layers(self.model))} layers in FP8" if self._is_set_up else "not set up"
        return (
            f"FP8TrainingEngine({type(self.model).__name__}, recipe={self.config.recipe!r}, {layers}, "
            f"steps={self._steps}, overflows={self._overflows})"
        )

    def __enter__(self) -> FP8TrainingEngine:
        self.setup_fp8_training()
        return self

    def __exit__(self, *_: object) -> None:
        """The model stays as it is; restore_original_model undoes the conversion."""

    def setup_fp8_training(self) -> bool:
        """Converts the model, once. Whether it has layers in FP8."""
        if not self._is_set_up:
            self.model = convert_model_to_fp8(self.model, self.config)
            scales_loss = self.config.loss_scaling
            if scales_loss is None:
                scales_loss = any(parameter.dtype == torch.float16 for parameter in self.model.parameters())
            self.loss_scale = self.config.initial_scale if scales_loss else 1.0
            self._is_set_up = True
        return bool(fp8_layers(self.model))

    def training_step(
        self, inputs: Any, targets: Any = None, return_loss: bool = True, *, backward: bool = True
    ) -> Any:
        """One forward and backward; gradients are added to what parameters hold.

        A model in evaluation mode is set to training mode; modules that are in evaluation mode inside a model in
        training mode stay so.

        Args:
            inputs: one argument of the model; a mapping (a tokenizer's batch) is its keyword arguments, a tuple its
                positional ones.
            targets: for the loss; None takes the loss of the model's own outputs.

        Returns the loss, of the model's own scale and already differentiated: calling its backward() does nothing
        more. With return_loss=False the outputs. With backward=False the loss is part of the graph and its backward is
        the caller's.
        """
        self.setup_fp8_training()
        if not self.model.training:
            self.model.train()
        outputs = self._call(inputs)
        loss = self.loss_function(outputs, targets)
        if backward:
            (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
        kept = loss.detach()
        self._loss_sum = kept.clone() if self._loss_sum is None else self._loss_sum + kept
        self._losses += 1
        if not return_loss:
            return outputs
        return DifferentiatedLoss.of(loss) if backward else loss

    def _call(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(*inputs) if type(inputs) is tuple else self.model(inputs)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, grad_scaler: Any = None) -> bool:
        """Unscales, checks, clips, steps, updates scales, and clears the gradients. Whether the optimizer stepped.

        A step is skipped, on every process alike, where a gradient, or anything that a layer rounded, was infinite or
        NaN. With a torch GradScaler it is asked as well, and updated. Where no process has a gradient, nothing is done
        or counted.
        """
        self.setup_fp8_training()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not self._joined(bool(gradients)):
            return False
        if gradients and grad_scaler is not None:
            grad_scaler.unscale_(optimizer)
        elif self.loss_scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale)
        self._last_overflow_layers = take_overflows(self.model, self.config.amax_group)
        is_bad = bool(gradients) and not self._clip(gradients)
        stepped = not self._joined(is_bad) and not self._last_overflow_layers
        if gradients and stepped:  # without gradients of its own this process has nothing to step
            grad_scaler.step(optimizer) if grad_scaler is not None else optimizer.step()
        if gradients and grad_scaler is not None:
            grad_scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if update_fp8_scales(self.model, self.config.amax_group):
            self._scale_updates += 1
        self._count(stepped)
        return stepped

    def _clip(self, gradients: list[Tensor]) -> bool:
        """Clips the gradients by the norm of all; whether that is finite."""
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.max_grad_norm is not None:
            factor = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, 1.0).to(gradients[0].device))
        full: Any = getattr(norm, "full_tensor", None)  # sharded gradients have a sharded norm
        return bool(torch.isfinite(full() if full is not None else norm))

    def _joined(self, flag: bool) -> bool:
        """Whether it is set on any process of the group."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return flag
        device = next((parameter.device for parameter in self.model.parameters()), None)
        flags = torch.tensor(float(flag), device=device)
        group: Any = self.config.amax_group
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group)
        return bool(flags)

    def _count(self, stepped: bool) -> None:
        self._steps += 1
        if stepped:
            self._steps_since_overflow += 1
            if self.loss_scale != 1.0 and self._steps_since_overflow % self.config.scaling_interval == 0:
                self.loss_scale *= self.config.growth_factor
        else:
            self._overflows += 1
            self._steps_since_overflow = 0
            if self.loss_scale != 1.0:
                self.loss_scale *= self.config.backoff_factor

    def get_training_statistics(self) -> dict[str, Any]:
        """Counts, the mean loss, the layers of the last overflow, and the scales of delayed layers."""
        layers = fp8_layers(self.model)
        plans = getattr(self.model, "fp8_plan", [])
        return {
            "steps": self._steps,
            "overflows": self._overflows,
            "last_overflow_layers": self._last_overflow_layers,
            "scale_updates": self._scale_updates,
            "avg_loss": float(self._loss_sum) / self._losses if self._loss_sum is not None else 0.0,
            "loss_scale": self.loss_scale,
            "fp8_enabled": bool(layers),
            "recipe": self.config.recipe,
            "fp8_layers": list(layers),
            "other_layers": {plan.name: plan.reason for plan in plans if not plan.converts},
            "scale_info": {
                name: dict(zip(("input", "weight", "gradient"), layer.fp8_scale.tolist()))
                for name, layer in layers.items()
                if layer.fp8_ready
            },
        }

    def save_checkpoint(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None, **extra: Any) -> None:
        """The model's state_dict, which is that of the model without FP8, with scales and counts beside it."""
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": optimizer.state_dict() if optimizer is not None else None,
                "fp8": {"scales": fp8_state_dict(self.model), "loss_scale": self.loss_scale, "steps": self._steps},
                "extra": extra,
            },
            path,
        )

    def load_checkpoint(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Loads what save_checkpoint wrote, or a checkpoint without FP8 state: scales then start anew. Its extra."""
        self.setup_fp8_training()
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if "model" not in loaded:
            loaded = {"model": loaded}
        self.model.load_state_dict(loaded["model"])
        if optimizer is not None and loaded.get("optimizer") is not None:
            optimizer.load_state_dict(loaded["optimizer"])
        state = loaded.get("fp8") or {}
        load_fp8_state_dict(self.model, state.get("scales", {}))
        self.loss_scale = state.get("loss_scale", self.loss_scale)
        self._steps = state.get("steps", self._steps)
        return loaded.get("extra") or {}

    def restore_original_model(self) -> nn.Module:
        """The layers that were there before, on the trained parameters. Returns the model."""
        self.model = restore_from_fp8(self.model)
        self._is_set_up = False
        return self.model


def create_fp8_trainer(
    model: nn.Module,
    forward_format: Any = FP8Format.E4M3,
    backward_format: Any = None,
    device: Any = None,
    **options: Any,
) -> FP8TrainingEngine:
    """An FP8TrainingEngine.

    Args:
        model: any model; its linear layers are converted when training is set up.
        forward_format, backward_format: FP8Format of activations and weights, and of gradients (None: E5M2). A device
            is taken in place of the first, as in create_fp8_trainer(model, device, forward_format, backward_format).
        options: fields of FP8Config, and loss_function.
    """
    if not _is_format(forward_format):
        _check_device(forward_format)
        device, forward_format, backward_format = forward_format, backward_format or FP8Format.E4M3, device
    loss_function = options.pop("loss_function", None)
    formats = {"forward_format": forward_format, "backward_format": backward_format or FP8Format.E5M2}
    config = FP8Config(**formats, **options)
    return FP8TrainingEngine(model, config, device, loss_function=loss_function)


def _check_device(value: Any) -> None:
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        known = ", ".join(item.value for item in FP8Format)
        raise ValueError(
            f"create_fp8_trainer: forward_format is {value!r}; formats are {known}, and a device in its place is named "
            "like cpu or cuda:0"
        ) from None


def _is_format(value: Any) -> bool:
    return isinstance(value, FP8Format) or value in [item.value for item in FP8Format]
