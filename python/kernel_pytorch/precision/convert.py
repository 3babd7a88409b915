"""Models to FP8 and back: which layers, and why the others stay. Parameters stay the same objects throughout."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from .. import _library
from .config import FP8Config
from .linear import FP8LinearLayer

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class FP8LayerPlan:
    """What becomes of one linear layer. Times are of forward and backward, predicted; 0 where FP8 is not for speed."""

    name: str
    converts: bool
    reason: str
    bf16_us: float = 0.0
    float8_us: float = 0.0


def plan_fp8(model: nn.Module, fp8_config: FP8Config | None = None) -> list[FP8LayerPlan]:
    """One entry for every nn.Linear of the model (and every module that hides one): converted or not, and why."""
    config = fp8_config or FP8Config()
    plans: list[FP8LayerPlan] = []
    hidden: list[str] = []  # modules that read the weights of layers inside them
    for name, module in model.named_modules():
        if any(name.startswith(f"{prefix}.") for prefix in hidden):
            continue
        if isinstance(module, nn.MultiheadAttention):
            hidden.append(name)
            plans.append(
                FP8LayerPlan(
                    name,
                    False,
                    "nn.MultiheadAttention reads the weights of its projections itself, past their forward; "
                    "use kernel_pytorch.attention's layers, or linear layers around scaled_dot_product_attention",
                )
            )
        elif isinstance(module, nn.Linear) and not isinstance(module, FP8LinearLayer):
            plans.append(_plan_layer(name, module, config))
    return plans


def _plan_layer(name: str, layer: nn.Linear, config: FP8Config) -> FP8LayerPlan:
    if name in config.skip or name.rpartition(".")[2] in config.skip:
        return FP8LayerPlan(name, False, "the configuration's skip names it")
    if type(layer).forward is not nn.Linear.forward:
        return FP8LayerPlan(name, False, f"{type(layer).__name__} has a forward of its own")
    if layer.weight.dtype not in _TYPES:
        return FP8LayerPlan(name, False, f"its weight is {layer.weight.dtype}; FP8 is made from fp32, bf16 or fp16")
    if layer.weight.is_meta:
        return FP8LayerPlan(name, True, "its weight has no memory yet")
    answer = _library.call(
        "float8_plan",
        request={
            "tokens": config.expected_tokens,
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "device": _device_word(layer.weight.device),
            "recipe": config.recipe,
        },
    )
    is_for_speed = answer["bf16_us"] > 0
    converts = config.convert != "none" and (answer["pays"] or not is_for_speed or config.convert == "all")
    return FP8LayerPlan(name, converts, answer["reason"], answer["bf16_us"], answer["float8_us"])


def _device_word(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{device.index if device.index is not None else torch.cuda.current_device()}"


def convert_model_to_fp8(
    model: nn.Module, fp8_config: FP8Config | None = None, inplace: bool = True, *, convert_linear: bool = True
) -> nn.Module:
    """The model with FP8LinearLayer instead of nn.Linear wherever that is possible and, on a GPU, pays.

    `plan_fp8` says which layers those are and why the others stay; the plan followed is left at `model.fp8_plan`.

    Args:
        inplace: False converts a copy and leaves the model alone.
        convert_linear: False converts nothing.
    """
    if not inplace:
        model = copy.deepcopy(model)
    config = fp8_config or FP8Config()
    plans = plan_fp8(model, config) if convert_linear else []
    converted: dict[nn.Module, FP8LinearLayer] = {}  # a layer used twice stays one layer
    for plan in plans:
        if not plan.converts:
            continue
        layer = model.get_submodule(plan.name)
        assert isinstance(layer, nn.Linear)
        if plan.name == "":
            return FP8LinearLayer.from_linear(layer, config)
        converted[layer] = FP8LinearLayer.from_linear(layer, config)
    _replace(model, converted)
    model.__dict__["fp8_plan"] = plans
    return model


def restore_from_fp8(model: nn.Module) -> nn.Module:
    """The way back, in place: nn.Linear on the same parameters."""
    if isinstance(model, FP8LinearLayer):
        return model.to_linear()
    layers = {layer: layer.to_linear() for layer in model.modules() if isinstance(layer, FP8LinearLayer)}
    _replace(model, layers)
    model.__dict__.pop("fp8_plan", None)
    model.__dict__.pop("_fp8_histories", None)
    return model


def _replace(model: nn.Module, replaced: dict[nn.Module, FP8LinearLayer] | dict[FP8LinearLayer, nn.Linear]) -> None:
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child in replaced:
                module._modules[name] = replaced[child]  # type: ignore[index]
