"""The settings of FP8 training: formats, recipe, and when a step is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

RECIPES = ("delayed", "current", "rowwise", "blockwise")
_STRATEGIES = {"dynamic": None, "static": "delayed", **{recipe: recipe for recipe in RECIPES}}


class FP8Format(Enum):
    """E4M3: 3 bits of mantissa, up to 448. E5M2: 2 bits, up to 57344."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is FP8Format.E4M3 else torch.float8_e5m2

    @property
    def largest(self) -> float:
        return 448.0 if self is FP8Format.E4M3 else 57344.0


def format_of(name: str, value: object) -> FP8Format:
    try:
        return FP8Format(value)
    except ValueError:
        known = ", ".join(item.value for item in FP8Format)
        raise ValueError(f"FP8Config: {name} is {value!r}; it must be one of {known}") from None


_ATTENTION = "attention has no FP8 kernel here: it runs in bf16, fp16 or fp32, the linear layers around it in FP8"
_REFUSED = {
    "fp8_dpa": _ATTENTION,
    "fp8_mha": _ATTENTION,
    "use_te_linear": "TransformerEngine is not used here: FP8LinearLayer runs on this library's kernels",
}


@dataclass
class FP8Config:
    """How layers are trained in FP8.

    Args:
        forward_format, backward_format: of activations and weights, and of gradients.
        scaling_strategy: the recipe. "delayed": one scale per tensor, from the amax of earlier steps, so that x is read
            once. "current": one scale per tensor, of this tensor. "rowwise": one per row. "blockwise": one per 1x128
            of activations and gradients and per 128x128 of weights. "dynamic" is delayed with an amax history, else
            current.
        margin: delayed scales leave 2^margin of room above the amax of the history.
        amax_history_len: steps that a delayed scale looks back.
        accurate_sums: which products leave the FP8 accumulator, which keeps about 14 bits on Hopper, every 128 of k:
            "backward" (usual), "all" or "none". Blockwise products always do, and so do machines without FP8 units.
        stochastic_gradients: gradients are rounded stochastically.
        max_grad_norm: gradients are clipped to this norm before a step; None does not clip.
        loss_scaling: the loss is multiplied before the backward and gradients are divided after it; None: where
            parameters are fp16, the only type that needs it.
        initial_scale, growth_factor, backoff_factor, scaling_interval: of that factor: grown after as many steps
            without an overflow, reduced after one.
        amax_group: the process group over which amax and overflows are joined; None is the default group.
        convert: "profitable": on a GPU with FP8 units a layer stays where the plan says that FP8 does not pay;
            "all": every layer that can be converted is; "none": none, which is the same loop without FP8. On other
            machines "profitable" means all: there FP8 is for trying it.
        skip: names of layers that stay, whole ("decoder.head") or their last part ("head"). The layer that makes logits
            is one to name: its gradient spans more magnitudes than one scale of a tensor covers.
        expected_tokens: rows of x per step, for that plan.
        enable_amax_history: what "dynamic" means.
        overflow_check_interval: a step is checked at least as often; every one is, whatever the number.
        fp8_dpa, fp8_mha, use_te_linear: of configurations written for TransformerEngine. Attention has no FP8 kernel
            here and TransformerEngine is not used, so True is refused.
    """

    forward_format: FP8Format = FP8Format.E4M3
    backward_format: FP8Format = FP8Format.E5M2
    scaling_strategy: str = "dynamic"
    scaling_interval: int = 1000
    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    overflow_check_interval: int = 100
    enable_amax_history: bool = True
    amax_history_len: int = 1024
    margin: int = 2
    fp8_dpa: bool = False
    fp8_mha: bool = False
    use_te_linear: bool = False
    accurate_sums: str = "backward"
    stochastic_gradients: bool = False
    max_grad_norm: float | None = None
    loss_scaling: bool | None = None
    amax_group: object | None = None
    convert: str = "profitable"
    skip: tuple[str, ...] = ()
    expected_tokens: int = 8192

    def __post_init__(self) -> None:
        self.forward_format = format_of("forward_format", self.forward_format)
        self.backward_format = format_of("backward_format", self.backward_format)
        for name, cure in _REFUSED.items():
            if getattr(self, name):
                raise ValueError(f"FP8Config: {name} is {getattr(self, name)!r}; {cure}, so leave it False")
        if self.scaling_strategy not in _STRATEGIES:
            raise ValueError(
                f"FP8Config: scaling_strategy is {self.scaling_strategy!r}; it must be one of {', '.join(_STRATEGIES)}"
            )
        if self.convert not in ("profitable", "all", "none"):
            raise ValueError(f"FP8Config: convert is {self.convert!r}; it must be profitable, all or none")
        if self.accurate_sums not in ("backward", "all", "none"):
            raise ValueError(f"FP8Config: accurate_sums is {self.accurate_sums!r}; it must be backward, all or none")
        for name in ("amax_history_len", "scaling_interval", "overflow_check_interval", "expected_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"FP8Config: {name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.margin <= 32:
            raise ValueError(f"FP8Config: margin is {self.margin}; it must lie between 0 and 32")
        if self.initial_scale <= 0 or self.growth_factor < 1 or not 0 < self.backoff_factor < 1:
            raise ValueError(
                f"FP8Config: initial_scale, growth_factor and backoff_factor are {self.initial_scale}, "
                f"{self.growth_factor} and {self.backoff_factor}; they must be positive, at least 1 and below 1"
            )

    @property
    def recipe(self) -> str:
        """delayed, current, rowwise or blockwise."""
        named = _STRATEGIES[self.scaling_strategy]
        return named or ("delayed" if self.enable_amax_history else "current")
