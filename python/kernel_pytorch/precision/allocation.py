"""What adaptive precision chooses from and what it is told: formats, strategies, modes, the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from .._ops.quantized_matmul import FORMATS, code_bytes, is_integer

_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class PrecisionFormat(Enum):
    """Formats of weights. "fp4" is nvfp4; "fp8_e4m3" is mxfp8, E4M3 codes with a scale for 32 columns."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    INT8 = "int8"
    INT6 = "int6"
    INT5 = "int5"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"
    FP4 = "fp4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"


class AllocationStrategy(Enum):
    """How the error of a layer in a format is estimated; all but the first need calibration data.

    - ENTROPY_BASED: from the weight alone: its energy times 4^-bits, more where the entropy of 4-bit codes is low,
      since then outliers set the scales. Cheap, and the least exact.
    - GRADIENT_WEIGHTED: the squared error of the layer's outputs on the calibration inputs, each output times the mean
      square of the loss's gradient there: the loss's change to second order, its Hessian taken as a product of one of
      inputs and a diagonal one of outputs.
    - ACTIVATION_AWARE: the squared error of the layer's outputs on the calibration inputs.
    - LAYER_ADAPTIVE: the change of the model's output with this layer alone in the format, measured. Slow and exact.
    - CONTENT_ADAPTIVE: a weighted sum of the first three, each as a share of its total over layers
      (PrecisionConfig.gradient_weight, activation_weight; the entropy has the rest).
    """

    ENTROPY_BASED = "entropy_based"
    GRADIENT_WEIGHTED = "gradient_weighted"
    ACTIVATION_AWARE = "activation_aware"
    LAYER_ADAPTIVE = "layer_adaptive"
    CONTENT_ADAPTIVE = "content_adaptive"

    @property
    def needs_data(self) -> bool:
        return self is not AllocationStrategy.ENTROPY_BASED


class QuantizationMode(Enum):
    """When weights are rounded.

    STATIC: at once, into packed codes; the weights are given up. INFERENCE: the same, and the module is in eval mode.
    DYNAMIC: as STATIC, at the first forward, whose input is the calibration data where none was given.
    TRAINING: weights stay parameters; each forward rounds them and gradients pass the rounding as if it were not there.
    HYBRID: as TRAINING while the module trains; in eval mode packed codes are multiplied.
    """

    DYNAMIC = "dynamic"
    STATIC = "static"
    HYBRID = "hybrid"
    TRAINING = "training"
    INFERENCE = "inference"


@dataclass(frozen=True)
class WeightFormat:
    """One choice for a layer: a format of `quantize_weight` and its options; format None leaves the weight alone."""

    format: str | None = None
    group: int | None = None
    asymmetric: bool = False

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(f'WeightFormat: format is "{self.format}"; it is None or one of {", ".join(FORMATS)}')

    def __str__(self) -> str:
        if self.format is None:
            return "unchanged"
        group = self.group or FORMATS[self.format][0][0]
        return f"{self.format} g{group}{' asymmetric' if self.asymmetric else ''}"

    def nbytes(self, weight: torch.Tensor) -> int:
        """Of a weight [rows, columns] in this format."""
        if self.format is None:
            return weight.nbytes
        rows, columns = weight.shape
        scales = rows * -(-columns // (self.group or FORMATS[self.format][0][0]))
        of_scale = weight.element_size() if is_integer(self.format) else 1
        of_tensor = 4 if self.format == "nvfp4" else 0
        return rows * code_bytes(self.format, columns) + scales * (of_scale + self.asymmetric) + of_tensor


# From few bits to many. Integers by groups of 32 have more bits than by 128, and smaller errors.
MENU = (
    WeightFormat("int2", 64, True), WeightFormat("int2", 32, True), WeightFormat("int3", 128, True),
    WeightFormat("int3", 32), WeightFormat("int3", 32, True),
    WeightFormat("int4", 128), WeightFormat("int4", 128, True), WeightFormat("mxfp4"), WeightFormat("int4", 64),
    WeightFormat("int4", 64, True), WeightFormat("int4", 32), WeightFormat("nvfp4"), WeightFormat("int4", 32, True),
    WeightFormat("int5", 128), WeightFormat("int5", 32), WeightFormat("int6", 128), WeightFormat("int6", 32),
    WeightFormat("int8", 128), WeightFormat("mxfp8"), WeightFormat(),
)  # fmt: skip

_OF_NAME = {
    PrecisionFormat.INT2: lambda one: one.format == "int2",
    PrecisionFormat.INT3: lambda one: one.format == "int3",
    PrecisionFormat.INT4: lambda one: one.format == "int4",
    PrecisionFormat.INT5: lambda one: one.format == "int5",
    PrecisionFormat.INT6: lambda one: one.format == "int6",
    PrecisionFormat.INT8: lambda one: one.format == "int8",
    PrecisionFormat.FP4: lambda one: one.format == "nvfp4",
    PrecisionFormat.NVFP4: lambda one: one.format == "nvfp4",
    PrecisionFormat.MXFP4: lambda one: one.format == "mxfp4",
    PrecisionFormat.MXFP8: lambda one: one.format == "mxfp8",
    PrecisionFormat.FP8_E4M3: lambda one: one.format == "mxfp8",
}


def menu_of(formats: Sequence[PrecisionFormat | WeightFormat] | None) -> tuple[WeightFormat, ...]:
    """The choices that these names stand for; a float type stands for the unchanged weight."""
    if formats is None:
        return MENU
    chosen: list[WeightFormat] = []
    for one in formats:
        if isinstance(one, WeightFormat):
            chosen.append(one)
        elif one in _OF_NAME:
            chosen += [choice for choice in MENU if _OF_NAME[one](choice)]
        else:
            chosen.append(WeightFormat())
    return tuple(dict.fromkeys(chosen))


@dataclass
class PrecisionConfig:
    """Adaptive precision of a model's weights.

    Args:
        base_precision: the type from which target_memory_reduction counts; None: the model's own.
        allocation_strategy: how errors are estimated.
        quantization_mode: when weights are rounded.
        target_memory_reduction: the share of the layers' bytes in base_precision that is saved.
        budget_bytes: of the layers' weights, instead of target_memory_reduction.
        formats: what a layer may be kept in; None: every format of `quantize_weight`, and the weight as it is.
        entropy_threshold: bits. ENTROPY_BASED and CONTENT_ADAPTIVE keep a layer in 8 bits or more where its 4-bit codes
            have less entropy.
        gradient_weight, activation_weight: of CONTENT_ADAPTIVE; together at most 1.
        rounding: "nearest"; "clipped": every group's range is the share of its largest magnitude with the least error,
            columns weighed by the calibration data where there is some; "gptq": such ranges, and columns are rounded
            one after another, so that what a column's rounding changes in the outputs on the calibration data is made
            up for by the columns after it (layers of more than 8192 columns: clipped).
        skip: names of layers that stay as they are, whole or their last part.
        update_frequency: TRAINING and HYBRID: formats are chosen anew after so many training forwards, where there is
            calibration data; 0: never.
    """

    base_precision: PrecisionFormat | None = PrecisionFormat.FP16
    allocation_strategy: AllocationStrategy = AllocationStrategy.ENTROPY_BASED
    quantization_mode: QuantizationMode = QuantizationMode.DYNAMIC
    entropy_threshold: float = 1.5
    target_memory_reduction: float = 0.4
    gradient_weight: float = 0.3
    activation_weight: float = 0.4
    budget_bytes: int | None = None
    formats: Sequence[PrecisionFormat | WeightFormat] | None = None
    rounding: str = "nearest"
    skip: Sequence[str] = ()
    update_frequency: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.target_memory_reduction < 1:
            raise ValueError(
                f"PrecisionConfig: target_memory_reduction is {self.target_memory_reduction}; it must be in [0, 1)"
            )
        weights = (self.gradient_weight, self.activation_weight)
        if min(weights) < 0 or sum(weights) > 1:
            raise ValueError(
                f"PrecisionConfig: gradient_weight is {weights[0]} and activation_weight {weights[1]}; they must not "
                "be negative and be at most 1 together"
            )
        if self.rounding not in ("nearest", "clipped", "gptq"):
            raise ValueError(f'PrecisionConfig: rounding is "{self.rounding}"; it is "nearest", "clipped" or "gptq"')
        if self.base_precision is not None and self.base_precision.value not in _FLOATS:
            raise ValueError(
                f"PrecisionConfig: base_precision is {self.base_precision.value}; it is fp32, fp16, bf16 or None"
            )

    def base_bytes(self, weight: torch.Tensor) -> int:
        if self.base_precision is None:
            return weight.nbytes
        return weight.numel() * _FLOATS[self.base_precision.value].itemsize
