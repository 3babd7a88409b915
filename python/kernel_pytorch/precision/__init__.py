"""Training in FP8: layers, conversion of models, an engine with overflow handling, and what it does to the numbers;
and linear layers whose weights have 4 or 8 bits, by one format or by what each layer needs (UltraPrecisionModule).

Recipes are delayed, current, rowwise and blockwise scaling (FP8Config). On a machine without FP8 units everything runs
with the same rounding, products being taken in fp32.
"""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .allocation import AllocationStrategy, PrecisionConfig, PrecisionFormat, QuantizationMode, WeightFormat
from .allocator import AdaptivePrecisionAllocator, LayerAllocation, PrecisionAllocation, RoundedLinear
from .config import FP8Config, FP8Format
from .convert import FP8LayerPlan, convert_model_to_fp8, plan_fp8, restore_from_fp8
from .engine import FP8TrainingEngine, create_fp8_trainer
from .fp4 import FP4Quantizer
from .fused import fp8_gated_mlp, fp8_norm_linear
from .int8_linear import Int8Linear
from .linear import FP8LinearLayer
from .models.checkpoints import load_quantized, save_quantized
from .models.conversion import QuantizedEmbedding, convert_model
from .models.experts import QuantizedExperts, QuantizedMatrices
from .models.hugging_face import register_huggingface
from .models.opened import OpenMultiheadAttention, open_layers
from .quantized_linear import QuantizedLinear
from .report import LayerNumerics, TensorNumerics, fp8_numerics_report
from .rounding import clipped_quantize, gptq_quantize
from .scales import fp8_layers, fp8_state_dict, load_fp8_state_dict, take_overflows, update_fp8_scales
from .sensitivity import LayerSensitivity
from .sparsity import (
    Sparse24Linear,
    SparseTrainingLinear,
    StructuredSparsity24,
    permuted_columns,
    transposable_mask,
)
from .tensors import dequantize_from_fp8, quantize_to_fp8
from .ultra import (
    PrecisionStats,
    UltraPrecisionModule,
    analyze_precision_opportunities,
    create_ultra_precision_module,
)

__all__ = [
    "AdaptivePrecisionAllocator",
    "AllocationStrategy",
    "FP4Quantizer",
    "FP8Config",
    "FP8Format",
    "FP8LayerPlan",
    "FP8LinearLayer",
    "FP8TrainingEngine",
    "Int8Linear",
    "LayerAllocation",
    "LayerNumerics",
    "LayerSensitivity",
    "OpenMultiheadAttention",
    "PrecisionAllocation",
    "PrecisionConfig",
    "PrecisionFormat",
    "PrecisionStats",
    "QuantizationMode",
    "QuantizedEmbedding",
    "QuantizedExperts",
    "QuantizedLinear",
    "QuantizedMatrices",
    "RoundedLinear",
    "Sparse24Linear",
    "SparseTrainingLinear",
    "StructuredSparsity24",
    "TensorNumerics",
    "UltraPrecisionModule",
    "WeightFormat",
    "analyze_precision_opportunities",
    "clipped_quantize",
    "convert_model",
    "convert_model_to_fp8",
    "create_fp8_trainer",
    "create_ultra_precision_module",
    "dequantize_from_fp8",
    "fp8_gated_mlp",
    "fp8_layers",
    "fp8_norm_linear",
    "fp8_numerics_report",
    "fp8_state_dict",
    "gptq_quantize",
    "load_fp8_state_dict",
    "load_quantized",
    "open_layers",
    "permuted_columns",
    "plan_fp8",
    "quantize_to_fp8",
    "register_huggingface",
    "restore_from_fp8",
    "save_quantized",
    "take_overflows",
    "transposable_mask",
    "update_fp8_scales",
]
