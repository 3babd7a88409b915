"""Training in FP8: a loss and its gradients, then a step that is taken, or skipped after an overflow, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from .config import FP8Config, FP8Format
from .convert import convert_model_to_fp8, restore_from_fp8
from .scales import fp8_layers, fp8_state_dict, load_fp8_state_dict, take_overflows, update_fp8_scales


def default_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropy over the last dimension for classes (integers), else the mean squared error."""
    if targets.dtype in (torch.int64, torch.int32):
        return torch_functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1).long())
    return torch_functional.mse_loss(outputs, targets)


class FP8TrainingEngine:
    """Trains a model whose linear layers compute in FP8.

        with FP8TrainingEngine(model, config) as trainer:
            loss = trainer.training_step(inputs, targets)
            stepped = trainer.optimizer_step(optimizer)

    The model is converted in place when training is set up (by `with`, or by the first step); its parameters stay the
    same objects, so an optimizer may be made before or after. restore_original_model puts nn.Linear back.

    Args:
        loss_function: (outputs, targets) -> loss; None is cross entropy for integers, else the mean squared error.
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

    def training_step(self, inputs: Any, targets: Any, return_loss: bool = True, *, backward: bool = True) -> Any:
        """One forward and backward; gradients are added to what parameters hold.

        Returns the loss, of the model's own scale and already differentiated: calling its backward() does nothing
        more. With return_loss=False the outputs. With backward=False the loss is part of the graph and its backward is
        the caller's.
        """
        self.setup_fp8_training()
        self.model.train()
        outputs = self.model(inputs)
        loss = self.loss_function(outputs, targets)
        if backward:
            (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
        kept = loss.detach()
        self._loss_sum = kept.clone() if self._loss_sum is None else self._loss_sum + kept
        self._losses += 1
        if not return_loss:
            return outputs
        return kept.requires_grad_() if backward else loss

    def optimizer_step(self, optimizer: torch.optim.Optimizer, grad_scaler: Any = None) -> bool:
        """Unscales, checks, clips, steps, updates scales, and clears the gradients. Whether the optimizer stepped.

        A step is skipped, on every process alike, where a gradient, or anything that a layer rounded, was infinite or
        NaN. With a torch GradScaler it is asked as well, and updated.
        """
        self.setup_fp8_training()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if grad_scaler is not None:
            grad_scaler.unscale_(optimizer)
        elif self.loss_scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale)
        self._last_overflow_layers = take_overflows(self.model, self.config.amax_group)
        norm = self._clip(gradients)
        stepped = not self._last_overflow_layers and norm is not None and self._all_agree(norm)
        if stepped:
            grad_scaler.step(optimizer) if grad_scaler is not None else optimizer.step()
        if grad_scaler is not None:
            grad_scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if update_fp8_scales(self.model, self.config.amax_group):
            self._scale_updates += 1
        self._count(stepped)
        return stepped

    def _clip(self, gradients: list[Tensor]) -> Tensor | None:
        """The norm of all gradients, which are clipped; None where there are none."""
        if not gradients:
            return None
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.max_grad_norm is not None:
            factor = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, 1.0).to(gradients[0].device))
        return norm

    def _all_agree(self, norm: Tensor) -> bool:
        full: Any = getattr(norm, "full_tensor", None)  # sharded gradients have a sharded norm
        bad = (~torch.isfinite(full() if full is not None else norm)).to(torch.float32)
        group: Any = self.config.amax_group
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(bad, distributed.ReduceOp.MAX, group)
        return not bool(bad)

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
        """nn.Linear again, on the trained parameters. Returns the model."""
        self.model = restore_from_fp8(self.model)
        self._is_set_up = False
        return self.model


def create_fp8_trainer(
    model: nn.Module,
    forward_format: Any = FP8Format.E4M3,
    backward_format: Any = FP8Format.E5M2,
    device: Any = None,
    **options: Any,
) -> FP8TrainingEngine:
    """An FP8TrainingEngine.

    Args:
        model: any model; its linear layers are converted when training is set up.
        forward_format, backward_format: FP8Format of activations and weights, and of gradients. A device is taken in
            place of the first, as in create_fp8_trainer(model, device, forward_format, backward_format).
        options: fields of FP8Config, and loss_function.
    """
    if not _is_format(forward_format):
        given_device, first, second = forward_format, backward_format, device
        device = given_device
        if _is_format(second):
            forward_format, backward_format = first, second
        else:
            forward_format = FP8Format.E4M3 if first == FP8Format.E5M2 else first
            backward_format = FP8Format.E5M2
    loss_function = options.pop("loss_function", None)
    config = FP8Config(forward_format=forward_format, backward_format=backward_format, **options)
    return FP8TrainingEngine(model, config, device, loss_function=loss_function)


def _is_format(value: Any) -> bool:
    return isinstance(value, FP8Format) or value in {item.value for item in FP8Format}
