"""Training in FP8: layers, conversion of models, an engine with overflow handling, and what it does to the numbers;
and linear layers whose weights have 4 or 8 bits.

Recipes are delayed, current, rowwise and blockwise scaling (FP8Config). On a machine without FP8 units everything runs
with the same rounding, products being taken in fp32.
"""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .config import FP8Config, FP8Format
from .convert import FP8LayerPlan, convert_model_to_fp8, plan_fp8, restore_from_fp8
from .engine import FP8TrainingEngine, create_fp8_trainer
from .fused import fp8_gated_mlp, fp8_norm_linear
from .linear import FP8LinearLayer
from .quantized_linear import QuantizedLinear
from .report import LayerNumerics, TensorNumerics, fp8_numerics_report
from .scales import fp8_layers, fp8_state_dict, load_fp8_state_dict, take_overflows, update_fp8_scales
from .tensors import dequantize_from_fp8, quantize_to_fp8

__all__ = [
    "FP8Config",
    "FP8Format",
    "FP8LayerPlan",
    "FP8LinearLayer",
    "FP8TrainingEngine",
    "LayerNumerics",
    "QuantizedLinear",
    "TensorNumerics",
    "convert_model_to_fp8",
    "create_fp8_trainer",
    "dequantize_from_fp8",
    "fp8_gated_mlp",
    "fp8_layers",
    "fp8_norm_linear",
    "fp8_numerics_report",
    "fp8_state_dict",
    "load_fp8_state_dict",
    "plan_fp8",
    "quantize_to_fp8",
    "restore_from_fp8",
    "take_overflows",
    "update_fp8_scales",
]
