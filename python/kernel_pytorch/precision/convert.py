"""Models to FP8 and back: which layers, and why the others stay. Parameters stay the same objects throughout."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from .. import _library
from ..core.attention import AttentionLayer
from .config import FP8Config
from .linear import FP8LinearLayer
from .models.opened import is_conv1d, replace_layers, take_fast_paths
from .own_layers import PROJECTION, FP8PackedProjection, add_projection, form_of, remove_projection
from .sensitivity import is_skipped

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class FP8LayerPlan:
    """What becomes of one layer. Times are of forward and backward, predicted; 0 where FP8 is not for speed."""

    name: str
    converts: bool
    reason: str
    bf16_us: float = 0.0
    float8_us: float = 0.0


def plan_fp8(model: nn.Module, fp8_config: FP8Config | None = None) -> list[FP8LayerPlan]:
    """One entry for every layer that multiplies by a weight (and every module that hides one): converted or not, why.

    The plan is for the device on which parameters are; for parameters on meta, for the GPU where there is one.
    """
    config = fp8_config or FP8Config()
    plans: list[FP8LayerPlan] = []
    hidden: list[str] = []  # modules that read the weights of layers inside them
    for name, module in model.named_modules():
        if any(name.startswith(f"{prefix}.") for prefix in hidden) or isinstance(module, FP8LinearLayer):
            continue
        if isinstance(module, nn.MultiheadAttention):
            hidden.append(name)
            plans.append(
                FP8LayerPlan(
                    name,
                    False,
                    "nn.MultiheadAttention reads the weights of its projections itself, past their forward; "
                    "precision.open_layers(model) gives it linear layers, kernel_pytorch.attention has others",
                )
            )
        elif is_conv1d(module):
            reason = "Conv1D keeps its weight transposed; precision.open_layers(model) makes it a linear layer"
            plans.append(FP8LayerPlan(name, False, reason))
        elif isinstance(module, AttentionLayer) and PROJECTION not in module._modules:
            inner = f"{name}.{PROJECTION}" if name else PROJECTION
            plans.append(_plan_weight(inner, module, "in_proj_weight", config, owner=name))
        elif isinstance(module, nn.Linear):
            if form_of(module) is None:
                reason = f"{type(module).__name__} has a forward of its own"
                plans.append(FP8LayerPlan(name, False, reason))
            else:
                plans.append(_plan_weight(name, module, "weight", config))
    return plans


def _plan_weight(
    name: str, module: nn.Module, weight_name: str, config: FP8Config, owner: str = ""
) -> FP8LayerPlan:  # fmt: skip
    if is_skipped(name, config.skip) or (owner and is_skipped(owner, config.skip)):
        return FP8LayerPlan(name, False, "the configuration's skip names it")
    weight = module._parameters.get(weight_name)
    if weight is None:
        return FP8LayerPlan(name, False, f"its {weight_name} is computed from other parameters before each use")
    if weight.dtype not in _TYPES:
        return FP8LayerPlan(name, False, f"its weight is {weight.dtype}; FP8 is made from fp32, bf16 or fp16")
    if weight.numel() == 0:
        return FP8LayerPlan(name, False, f"its weight has shape {tuple(weight.shape)}: nothing is multiplied")
    device = _planned_device(weight.device)
    if device.type not in ("cpu", "cuda"):
        return FP8LayerPlan(name, False, f"its weight is on {device}; FP8 runs on CPUs and CUDA GPUs")
    answer = _library.call(
        "float8_plan",
        request={
            "tokens": config.expected_tokens,
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "device": str(device),
            "recipe": config.recipe,
        },
    )
    is_wanted = config.convert == "all" or answer["pays"] or (config.convert == "profitable" and device.type == "cpu")
    converts = answer["runs"] and is_wanted and config.convert != "none"
    return FP8LayerPlan(name, converts, answer["reason"], answer["bf16_us"], answer["float8_us"])


def _planned_device(device: torch.device) -> torch.device:
    """Where the layer runs. What is on meta has no memory yet, and goes to the GPU where there is one."""
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def convert_model_to_fp8(
    model: nn.Module, fp8_config: FP8Config | None = None, inplace: bool = True, *, convert_linear: bool = True
) -> nn.Module:
    """The model with FP8LinearLayer instead of nn.Linear wherever that runs and, on a GPU, pays.

    This library's own layers are converted as well: OptimizedLinear, FusedLinearActivation, and the projections of
    AttentionLayer, whose product of query, key and value appears as its submodule `in_proj`. Parameters and the
    state_dict stay what they are. `plan_fp8` says which layers are converted and why the others stay; the plan
    followed is left at `model.fp8_plan`.

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
        owner, _, last = plan.name.rpartition(".")
        if last == PROJECTION and isinstance(model.get_submodule(owner), AttentionLayer):
            add_projection(model.get_submodule(owner), config)
            continue
        layer = model.get_submodule(plan.name)
        assert isinstance(layer, nn.Linear)
        form = form_of(layer)
        assert form is not None
        converted[layer] = form.from_linear(layer, config)
    model = replace_layers(model, converted)
    model.__dict__["fp8_plan"] = plans
    return model


def restore_from_fp8(model: nn.Module) -> nn.Module:
    """The way back, in place: the layers that were there, on the same parameters; hooks stay."""
    if isinstance(model, FP8LinearLayer):
        return model.to_linear()
    layers: dict[nn.Module, nn.Module] = {}
    for layer in list(model.modules()):
        if isinstance(layer, FP8PackedProjection):
            remove_projection(layer)
        elif isinstance(layer, FP8LinearLayer):
            layers[layer] = layer.to_linear()
    replace_layers(model, layers)
    take_fast_paths(model)
    model.__dict__.pop("fp8_plan", None)
    model.__dict__.pop("_fp8_histories", None)
    return model
